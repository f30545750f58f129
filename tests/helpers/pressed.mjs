// Runs pages of `explain` in Node and presses their controls, for pressed.py. On standard input {page: HTML, visits}; a visit: {hash, reduced,
// steps}; a step: [kind, selector, value]. On standard output, of each visit, what the page shows at first and after each step.

import { createHash } from 'node:crypto';
import fs from 'node:fs';

import { opened, press, run } from './dom.mjs';

const { page, visits } = JSON.parse(fs.readFileSync(0, 'utf8'));
const html = fs.readFileSync(page, 'utf8');
const digest = (text) => createHash('sha1').update(text).digest('hex').slice(0, 12);
const pause = (ms = 0) => new Promise((go) => { setTimeout(go, ms); });

function shown({ document, location }) {
  const text = (id) => document.getElementById(id)?.textContent ?? null;
  const sections = Object.fromEntries(document.querySelectorAll('.station').map((section) => [section.id, {
    digest: digest(['.formula', '.body', '.answer'].map((part) => section.querySelector(part).innerHTML).join()),
    named: Object.fromEntries(section.querySelectorAll('[data-name]').map(({ dataset }) => [dataset.name, Number(dataset.derived)])),
  }]));
  const on = (kind) => document.querySelectorAll(`[data-${kind}][aria-pressed="true"]`).map((each) => each.dataset[kind]);
  return { hash: location.hash, sections, ...Object.fromEntries(['output', 'said', 'wrong', 'broken', 'strange', 'scores'].map((id) => [id, text(id)])),
    busy: !document.getElementById('busy').hidden, chosen: Object.fromEntries(['word', 'step', 'layer', 'head', 'stack', 'model'].map((kind) => [kind, on(kind)])), seen: document.shown ?? null };
}

const events = {
  click: (element) => press(element, 'click'),
  point: (element, x) => press(element, 'click', { clientX: x }),
  set: (element, value) => { element.value = value; press(element, 'input'); press(element, 'change'); },
  type: (element, value) => { element.value = value; press(element, 'input'); },
  check: (element, on) => { element.checked = on; press(element, 'change'); },
  key: (element, { key, ...held }) => press(element, 'keydown', { key, ...held }),
};

const answers = [];
for (const { hash = '', reduced = false, steps } of visits) {
  const window = opened(html, { hash, reduced });
  const { document } = window;
  const ready = async () => { do await pause(); while (!document.documentElement.dataset.ready || !document.getElementById('busy').hidden); await pause(20); };
  run(window);
  await ready();
  const states = [shown(window)];
  for (const [kind, selector, value] of steps) {
    if (kind === 'read') { // the HTML of all that fit
      states.push(document.querySelectorAll(selector).map((each) => each.outerHTML));
      continue;
    }
    const element = selector === 'body' ? document.body : document.querySelector(selector);
    if (!element) throw new Error(`nothing on the page is ${selector}`);
    events[kind](element, value);
    if (kind === 'type' && value?.now) states.push(shown(window));
    await ready();
    states.push({ ...shown(window), copied: window.copied });
  }
  answers.push(states);
}
process.stdout.write(JSON.stringify(answers));

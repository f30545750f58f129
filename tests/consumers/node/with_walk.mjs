// Uses the walk through a model as people do: in headless Chromium, from the file, without a network.
//
//     CHROMIUM=/usr/bin/chromium node with_walk.mjs TASKS.json ANSWERS.json
//
// TASKS: [{page, model, texts, switches, link, width}], or [{page, keys, width, height, colorScheme}] for keys alone; page: a file, or an address. Each text is typed; of every stack, layer and head all numbers
// that name a point are read. ANSWERS: for each page {texts: [{output, numbers: {point: {index: value}}, sums}], off:
// {switch: {name: value}}, times, ...}: milliseconds, which depend on the machine. Beside ANSWERS.json: pictures.

import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { basename, dirname, join } from 'node:path';
import { pathToFileURL } from 'node:url';

import { chromium } from 'playwright-core';

const FLAGS = ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking'];
const PATIENCE = 240_000;
const [tasksFile, answersFile] = process.argv.slice(2);
const profile = mkdtempSync(join(tmpdir(), 'chromium-'));
const browser = await chromium.launchPersistentContext(profile, {
  executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium', headless: true, args: FLAGS, chromiumSandbox: false,
});

/** In the page: what stands there. */
function collected() {
  const numbers = {};
  const keep = ({ point, index }, value) => { (numbers[point] ??= {})[index] = Number(value); };
  for (const { dataset } of document.querySelectorAll('#walk [data-value]')) keep(dataset, dataset.value);
  for (const { dataset } of document.querySelectorAll('#walk [data-point][data-values]')) {
    dataset.values.split(' ').forEach((value, n) => keep({ ...dataset, index: `${dataset.index},${Number(dataset.from) + n}` }, value));
  }
  const sums = [...document.querySelectorAll('#walk .sum')].map((sum) => {
    const { value, derived } = sum.querySelector('.total .n').dataset;
    const terms = (sum.querySelector('template')?.content ?? sum).querySelectorAll('.term');
    return [[...terms].reduce((total, term) => total + Number(term.dataset.term), 0), Number(value ?? derived)];
  });
  const named = Object.fromEntries([...document.querySelectorAll('#seen [data-name]')].map(({ dataset }) => [dataset.name, Number(dataset.derived)]));
  const beside = Object.fromEntries([...document.querySelectorAll('#beside [data-name]')].map(({ dataset }) => [dataset.name, Number(dataset.derived)]));
  return { numbers, sums, named, beside, output: document.getElementById('output').textContent, said: document.getElementById('said').textContent };
}

const ready = (page) => page.waitForFunction(() => document.documentElement.dataset.ready, null, { timeout: PATIENCE });

async function typed(page, text) {
  await page.evaluate(() => { delete document.documentElement.dataset.ready; });
  const began = Date.now();
  await page.fill('#text', text);
  await ready(page);
  return Date.now() - began;
}

const median = (values) => values.sort((a, b) => a - b)[Math.floor(values.length / 2)];

/** In the page: milliseconds from a key to other strips, laid out; and to its first text. */
function waited() {
  const keys = Array.from({ length: 9 }, (_, n) => {
    const began = performance.now();
    document.body.dispatchEvent(new KeyboardEvent('keydown', { key: n % 2 ? 'ArrowLeft' : 'ArrowRight', bubbles: true }));
    return document.body.offsetHeight && performance.now() - began;
  });
  return { keys, paint: performance.getEntriesByName('first-contentful-paint')[0]?.startTime };
}

/** In the page: each number as it is drawn, beside the one that it stands for; and where one looks. */
function drawn(pointed) {
  const all = (chosen, root = document) => [...root.querySelectorAll(chosen)];
  for (const held of all('#walk details > template')) { held.parentElement.open = true; held.replaceWith(held.content); }
  for (const each of all('#walk .numbers')) { each.open = true; each.dispatchEvent(new Event('toggle')); }
  const [pairs, strips, rest, worked, named] = [new Set(), new Set(), new Set(), [], []];
  const pair = (text, value, digits) => pairs.add(JSON.stringify([text, String(value), digits]));
  for (const each of all('#walk [data-value], #walk [data-derived]')) pair(each.textContent, each.dataset.value ?? each.dataset.derived, 2);
  for (const term of all('#walk .term')) {
    const [said, total] = [term.textContent, term.querySelector('.n').textContent];
    pairs.add(JSON.stringify([said.slice(0, said.length - total.length), term.dataset.term, 'term']));
    pair(total, term.dataset.term, 3);
  }
  const values = (row) => row.dataset.values.split(' ');
  const shades = (row) => [row.style.getPropertyValue('--c'), row.style.getPropertyValue('--m')].map((each) => each.replace('linear-gradient(90deg,', ''));
  for (const section of all('#walk .station')) {
    const tables = all('.numbers tbody tr', section).map((row) => all('th, td', row).map((cell) => cell.textContent));
    all('.vector', section).forEach((vector, n) => {
      const rows = all('i', vector).filter((row) => row.dataset.values);
      strips.add(JSON.stringify({ section: section.id, label: vector.querySelector('.name').textContent, said: vector.querySelector('.strip').getAttribute('aria-label'),
        ends: vector.querySelector('.ends').textContent, values: rows.flatMap(values), shades: rows.map(shades), table: tables[n], point: rows[0].dataset.point ?? null }));
    });
    for (const map of all('.map', section)) {
      strips.add(JSON.stringify({ section: section.id, said: map.getAttribute('aria-label'), rows: all('i', map).map(values), lit: all('.line', map).findIndex((line) => line.classList.contains('on')), shades: all('i', map).map(shades) }));
    }
    const numbers = all('[data-derived]', section).map(({ dataset }) => [dataset.name ?? '', dataset.derived]);
    named.push([section.id, numbers, all('.vector', section).filter((each) => !each.querySelector('[data-point]')).map((each) => [each.querySelector('.name').textContent, all('i', each).flatMap(values)])]);
    const bare = section.cloneNode(true);
    for (const fold of all('details', bare).filter((each) => each.querySelector('summary').textContent.includes(' = '))) { // a worked example: d = 4, d_k = 64
      worked.push([section.id, all('td', fold).map((cell) => cell.textContent), all('p', fold).map((each) => each.textContent).join()]);
      fold.remove();
    }
    for (const each of all('[data-value], [data-derived], .term, .ends, .numbers, .chip, .answer, .ask, select, input, output', bare)) each.remove();
    for (const [text] of bare.textContent.matchAll(/.{0,30}\d\.\d.{0,20}|.{0,30}\de[-−+]?\d.{0,20}/g)) rest.add(JSON.stringify([section.id, text]));
    for (const each of all('.strip, .map', bare)) each.removeAttribute('aria-label');
    for (const each of all('[aria-label], [title]', bare)) {
      const text = each.getAttribute('aria-label') ?? each.title;
      if (/\d\.\d/.test(text)) rest.add(JSON.stringify([section.id, text]));
    }
  }
  for (const [text] of document.getElementById('said').innerHTML.replace(/<b.*?<\/b>/g, '').matchAll(/\d\.\d/g)) rest.add(JSON.stringify(['said', text]));
  if (pointed) { // what is said of each cell that is pointed at
    const readout = document.getElementById('readout');
    for (const row of all('#walk .strip i, #walk .map i').filter((each) => each.dataset.values && each.offsetWidth)) {
      const { left, width, top } = row.getBoundingClientRect();
      values(row).forEach((value, n, { length }) => {
        row.dispatchEvent(new PointerEvent('pointermove', { bubbles: true, clientX: left + ((n + 0.5) * width) / length, clientY: top }));
        const at = readout.textContent.lastIndexOf(': ');
        const column = row.closest('.map') ? JSON.parse(row.closest('[data-columns]').dataset.columns)[n] : `column ${Number(row.dataset.from) + n}`;
        if (!readout.textContent.slice(0, at).endsWith(column)) rest.add(JSON.stringify(['readout', readout.textContent]));
        pair(readout.textContent.slice(at + 2), value, 4);
      });
    }
    readout.hidden = true;
  }
  const on = (chosen) => Number(all(chosen).map((each) => Object.values(each.dataset)[0])[0] ?? -1);
  const chosen = (of) => all(`${of} tr`).filter((row) => row.querySelector('[data-key]')).findIndex((row) => row.classList.contains('on'));
  return { pairs: [...pairs], strips: [...strips], rest: [...rest], worked: worked.map((each) => JSON.stringify(each)), state: { named,
    stack: all('#picks [data-stack][aria-pressed=true]')[0]?.dataset.stack ?? null, layer: on('#picks [data-layer][aria-pressed=true]'), head: on('#picks [data-head][aria-pressed=true]'),
    word: on('#chips [data-word][aria-pressed=true]'), step: on('#chips [data-step][aria-pressed=true]'), key: chosen('#cell'), cross: chosen('#cross') } };
}

/** In the page of a site: what its graphs give of a text, by point: {shape, data}, each number as text. */
async function tapped(text) {
  const { points } = await (await import(new URL('inside.js', document.baseURI))).read(text);
  return Object.fromEntries(Object.entries(points).map(([name, { shape, data }]) => [name, { shape, data: Array.from(data, String) }]));
}

/** In the page: what one at the keyboard sees of the element that has the focus. null: the page has it, none of its elements. */
function focused() {
  const on = document.activeElement;
  if (on === document.body || on === document.documentElement) return null;
  (globalThis.reached ??= new Set()).add(globalThis.signed(on));
  (globalThis.visited ??= new Set()).add(on.closest('.station')?.id);
  const again = on === globalThis.first; // once around
  globalThis.first ??= on;
  const rects = [...on.getClientRects()].filter(({ width, height }) => width && height);
  const [shown, spots] = [rects.flatMap(({ left, top, width, height }) => [0.15, 0.3, 0.5, 0.7, 0.85].flatMap((x) => (
    [0.15, 0.3, 0.5, 0.7, 0.85].map((y) => on.contains(document.elementFromPoint(left + x * width, top + y * height)))))), 25 * rects.length];
  const { outlineStyle, outlineWidth, outlineOffset, outlineColor } = getComputedStyle(on);
  const edge = outlineStyle === 'none' ? 0 : parseFloat(outlineWidth) + parseFloat(outlineOffset);
  const frames = []; // of what cuts off what is outside
  const fixed = (each) => getComputedStyle(each).position === 'fixed';
  for (let each = on; each.parentElement && !fixed(each);) {
    each = each.parentElement;
    if (each !== document.body && each !== document.documentElement && /auto|scroll|hidden|clip/.test(getComputedStyle(each).overflow)) frames.push(each.getBoundingClientRect());
  }
  frames.push({ left: 0, top: 0, right: innerWidth, bottom: innerHeight });
  const { left, top, right, bottom } = on.getBoundingClientRect();
  const inside = (x, y) => frames.every((frame) => x >= frame.left && x <= frame.right && y >= frame.top && y <= frame.bottom);
  const [middle, half] = [(Math.max(left, 0) + Math.min(right, innerWidth)) / 2, (Math.max(top, 0) + Math.min(bottom, innerHeight)) / 2];
  const sides = [[left - edge, half], [right + edge, half], [middle, top - edge], [middle, bottom + edge]].filter(([x, y]) => inside(x, y)).length;
  const light = (colour) => colour.map((each) => (each / 255 <= 0.04045 ? each / 255 / 12.92 : ((each / 255 + 0.055) / 1.055) ** 2.4)).reduce((sum, each, n) => sum + each * [0.2126, 0.7152, 0.0722][n], 0.05);
  const rgb = (colour) => colour.match(/[\d.]+/g).map(Number);
  let under = on.parentElement; // what the outline is drawn on
  while (under.parentElement && (rgb(getComputedStyle(under).backgroundColor)[3] ?? 1) < 1) under = under.parentElement;
  const [a, b] = [outlineColor, getComputedStyle(under).backgroundColor].map((colour) => light(rgb(colour).slice(0, 3)));
  return {
    again, what: globalThis.signed(on),
    seen: shown.filter(Boolean).length / spots, tall: bottom - top, top, sides, outline: outlineStyle === 'none' ? 0 : parseFloat(outlineWidth), contrast: Math.max(a, b) / Math.min(a, b),
  };
}

/** All stacks, layers and heads: the numbers of each, together. whole: whether all that is drawn of each is read, every cell
 * pointed at, which takes long; else of the last one. */
async function walked(page, whole) {
  const found = { numbers: {}, sums: [], states: [] };
  const kept = { pairs: new Set(), strips: new Set(), rest: new Set(), worked: new Set() };
  const stacks = await page.evaluate(() => [...document.querySelectorAll('#picks [data-stack]')].map((each) => each.dataset.stack));
  for (const stack of stacks.length ? stacks : ['']) {
    if (stack) await page.click(`#picks [data-stack=${stack}]`);
    const [layers, heads] = await page.evaluate(() => ['layer', 'head'].map((name) => document.querySelectorAll(`#picks [data-${name}]`).length));
    for (let layer = 0; layer < layers; layer++) {
      for (let head = 0; head < heads; head++) {
        await page.click(`#picks [data-layer="${layer}"]`);
        await page.click(`#picks [data-head="${head}"]`);
        await ready(page); // what is out of sight is drawn in slices
        if (whole || (layer === layers - 1 && head === heads - 1)) {
          const { state, ...each } = await page.evaluate(drawn, whole && head === 0);
          found.states.push(state);
          for (const [kind, all] of Object.entries(each)) all.forEach((one) => kept[kind].add(one));
        }
        const { numbers, sums, beside, output } = await page.evaluate(collected);
        for (const [point, values] of Object.entries(numbers)) found.numbers[point] = { ...found.numbers[point], ...values };
        found.sums.push(...sums);
        Object.assign(found, { output, beside });
      }
    }
  }
  return { ...found, ...Object.fromEntries(Object.entries(kept).map(([kind, all]) => [kind, [...all].map(JSON.parse)])) };
}

async function answered({ page: file, model, texts, switches = [], width = 1100 }) {
  const answer = { problems: [], requests: [], texts: [], off: {} };
  const page = await browser.newPage();
  page.on('console', (message) => message.type() === 'error' && answer.problems.push(message.text()));
  page.on('pageerror', (error) => answer.problems.push(String(error.stack ?? error)));
  const url = file.startsWith('http:') ? file : pathToFileURL(file).href;
  const own = [new URL(url).origin === 'null' ? 'file:' : new URL(url).origin, 'data:'];
  page.on('request', (request) => own.some((begin) => request.url().startsWith(begin)) || answer.requests.push(request.url()));
  await page.addInitScript(() => { // what goes wrong ends the waiting
    for (const kind of ['error', 'unhandledrejection']) addEventListener(kind, () => { document.documentElement.dataset.ready = 'failed'; });
  });
  await page.setViewportSize({ width, height: 900 });
  const began = Date.now();
  await page.goto(url, { timeout: PATIENCE });
  await ready(page);
  const all = Date.now() - began;
  answer.questions = await page.evaluate(() => [...document.querySelectorAll('.answer')].map((each) => [each.querySelector('h3').textContent, each.querySelector('p').textContent, each.closest('section').querySelectorAll('.n').length]));
  answer.unknown = await page.evaluate(() => { // terms without an entry in the glossary
    const listed = new Set([...document.querySelectorAll('#glossary-list b')].map((each) => each.textContent));
    return [...document.querySelectorAll('.gl')].map((each) => each.dataset.gl).filter((term) => !listed.has(term));
  });
  answer.unseen = await page.evaluate(() => [...document.querySelectorAll('.station')].filter((station) => { // not on one screen with what shows it
    station.scrollIntoView({ block: 'start', behavior: 'instant' });
    const over = Math.max(...['sticky', 'now'].map((id) => document.getElementById(id)).filter((each) => getComputedStyle(each).position === 'sticky').map((each) => each.getBoundingClientRect().bottom), 0);
    const { top, bottom } = station.querySelector('.answer').getBoundingClientRect();
    const drawn = station.querySelector('.strip, .map, table, svg, .chips, #seen')?.getBoundingClientRect() ?? { top, bottom }; // a place nothing is drawn for
    return top < over || bottom > innerHeight || drawn.top + 20 > innerHeight;
  }).map(({ id }) => id));
  await page.evaluate(() => scrollTo(0, 0));
  await page.click('#tour-start');
  answer.tour = [];
  for (; await page.isVisible('#tour'); await page.click('#tour [data-tour=next]')) answer.tour.push(await page.textContent('#tour p'));
  answer.glossary = await page.locator('#glossary-list li').count();
  answer.wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  if (model) await page.click(`#tabs [data-model="${model}"]`);
  await ready(page);
  const outputs = [];
  for (const text of texts) {
    if (text !== null) outputs.push(await typed(page, text)); // else what the page begins with
    answer.texts.push({ text, ...await walked(page, text === texts[0] && text !== null), ...(file.startsWith('http:') ? { tapped: await page.evaluate(tapped, text) } : {}) });
  }
  const before = await page.evaluate(collected);
  for (const name of switches) {
    await page.evaluate(() => { delete document.documentElement.dataset.ready; });
    await page.check(`[data-off=${name}]`);
    await ready(page);
    const { named, output } = await page.evaluate(collected);
    answer.off[name] = { ...named, output };
    if (name === switches.at(-1)) { // a copied link shows the same page
      const other = await browser.newPage();
      await other.goto(page.url(), { timeout: PATIENCE });
      await ready(other);
      answer.linked = JSON.stringify(await other.evaluate(collected)) === JSON.stringify(await page.evaluate(collected));
      await other.close();
    }
    await page.evaluate(() => { delete document.documentElement.dataset.ready; });
    await page.click('#all-on');
    await ready(page);
  }
  answer.same = JSON.stringify((await page.evaluate(collected)).numbers) === JSON.stringify(before.numbers);
  const { keys, paint } = await page.evaluate(waited);
  answer.times = Object.fromEntries(Object.entries({ paint, all, key: median(keys), text: median(outputs) }).map(([name, ms]) => [name, Math.round(ms)]));
  await page.screenshot({ path: join(dirname(answersFile), `${basename(file, '.html')}-${width}.png`) });
  await page.close();
  return answer;
}

const MOST_STOPS = 900;

/** Goes over the page by keys alone, from its beginning to its end and back, opening what unfolds, and on to each step: [what is looked for
 * with Tab, keys pressed there, what has the focus then, what is read]. Of every stop it says how the focus is seen. */
async function byKeys({ page: file, keys, width, height, colorScheme }) {
  const answer = { problems: [], stops: [], back: [], steps: [], wrong: [] };
  const page = await browser.newPage();
  page.on('console', (message) => message.type() === 'error' && answer.problems.push(message.text()));
  page.on('pageerror', (error) => answer.problems.push(String(error.stack ?? error)));
  const asked = await page.context().newCDPSession(page);
  await page.emulateMedia({ colorScheme, reducedMotion: 'reduce' });
  await page.setViewportSize({ width, height });
  await page.addInitScript(() => { // an element, though it be drawn anew
    globalThis.signed = (each) => `${each.closest('[id]').id}: ${each.localName} ${each.classList[0] ?? ''} ${JSON.stringify({ ...each.dataset })} ${each.ariaLabel ?? each.textContent.trim().slice(0, 40)}`;
  });
  await page.goto(pathToFileURL(file).href);
  await ready(page);

  /** What has the focus, with the name that is read aloud. */
  async function stop() {
    const found = await page.evaluate(focused);
    if (!found) return null;
    const { result } = await asked.send('Runtime.evaluate', { expression: 'document.activeElement' });
    const { nodes } = await asked.send('Accessibility.getPartialAXTree', { objectId: result.objectId, fetchRelatives: false });
    return { ...found, name: nodes[0]?.name?.value ?? '', role: nodes[0]?.role?.value ?? '' };
  }
  const pressed = async (key) => { await page.keyboard.press(key); await ready(page); return stop(); };

  /** From the page itself over all stops to the page again. */
  async function over(key, found, opens) {
    await page.evaluate(() => { globalThis.first = null; });
    for (let each = await pressed(key); each && !each.again; each = await pressed(key)) {
      found.push(each);
      if (found.length > MOST_STOPS) throw new Error(`${key} never comes to an end: ${each.what}`);
      if (opens && each.role === 'DisclosureTriangle' && !await page.evaluate(() => document.activeElement.parentElement.open)) {
        const open = await pressed('Enter');
        if (open?.what !== each.what) answer.wrong.push(`Enter on ${each.what}: then ${open?.what}`);
      }
    }
  }
  await over('Tab', answer.stops, true);
  await over('Shift+Tab', answer.back, false);
  // What a mouse presses; keys have the button beside a map, and comma and full stop for a strip's columns.
  answer.unreached = await page.evaluate(() => [...document.querySelectorAll('body *')].filter((each) => {
    const pressable = each.matches('a[href], button, input, select, textarea, summary') || getComputedStyle(each).cursor === 'pointer';
    const key = each.closest('a, button, summary') ?? (each.closest('.map') ? each.closest('[data-of]')?.querySelector('[data-large]') ?? each : each);
    return pressable && each.checkVisibility() && !each.closest('.strip') && !globalThis.reached.has(globalThis.signed(key));
  }).map((each) => globalThis.signed(each)));
  answer.unvisited = await page.evaluate(() => [...document.querySelectorAll('.station')].map(({ id }) => id).filter((id) => !globalThis.visited.has(id)));
  for (const [wanted, pressing, keeps, read] of keys) {
    let found = await stop();
    for (let n = 0; wanted && !(found && await page.evaluate((selector) => document.activeElement.matches(selector), wanted)); n++) {
      if (n > MOST_STOPS) throw new Error(`Tab never comes to ${wanted}`);
      found = await pressed('Tab');
    }
    const after = [];
    for (const key of pressing) {
      if (key.startsWith('"')) { await page.keyboard.type(JSON.parse(key)); await page.waitForTimeout(200); await ready(page); } else await page.keyboard.press(key);
      await ready(page);
      after.push(await stop());
    }
    answer.steps.push({ after, ...await page.evaluate(([holder, selector]) => ({
      kept: document.activeElement.matches(holder),
      read: [...document.querySelectorAll(selector)].filter((each) => each.checkVisibility()).map((each) => each.textContent),
    }), [keeps, read]) });
  }
  await page.screenshot({ path: join(dirname(answersFile), `${basename(file, '.html')}-keys-${width}.png`) });
  await page.close();
  return answer;
}

try {
  const answers = [];
  for (const task of JSON.parse(readFileSync(tasksFile, 'utf-8'))) answers.push(await (task.keys ? byKeys : answered)(task));
  writeFileSync(answersFile, JSON.stringify(answers));
} finally {
  await browser.close();
  rmSync(profile, { recursive: true, force: true });
}

// Uses the walk through a model as people do: in headless Chromium, from the file, without a network.
//
//     CHROMIUM=/usr/bin/chromium node with_walk.mjs TASKS.json ANSWERS.json
//
// TASKS: [{page, model, texts, switches, link, width}]; page: a file, or an address. Each text is typed; of every stack, layer and head all numbers
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
  return { numbers, sums, named, output: document.getElementById('output').textContent, said: document.getElementById('said').textContent };
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

/** All stacks, layers and heads: the numbers of each, together. */
async function walked(page) {
  const found = { numbers: {}, sums: [] };
  const stacks = await page.evaluate(() => [...document.querySelectorAll('#picks [data-stack]')].map((each) => each.dataset.stack));
  for (const stack of stacks.length ? stacks : ['']) {
    if (stack) await page.click(`#picks [data-stack=${stack}]`);
    const [layers, heads] = await page.evaluate(() => ['layer', 'head'].map((name) => document.querySelectorAll(`#picks [data-${name}]`).length));
    for (let layer = 0; layer < layers; layer++) {
      for (let head = 0; head < heads; head++) {
        await page.click(`#picks [data-layer="${layer}"]`);
        await page.click(`#picks [data-head="${head}"]`);
        const { numbers, sums, output } = await page.evaluate(collected);
        for (const [point, values] of Object.entries(numbers)) found.numbers[point] = { ...found.numbers[point], ...values };
        found.sums.push(...sums);
        found.output = output;
      }
    }
  }
  return found;
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
  answer.glossary = await page.locator('#glossary-list li').count();
  answer.wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  if (model) await page.click(`#tabs [data-model="${model}"]`);
  await ready(page);
  const outputs = [];
  for (const text of texts) {
    outputs.push(await typed(page, text));
    answer.texts.push({ text, ...await walked(page) });
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

try {
  const answers = [];
  for (const task of JSON.parse(readFileSync(tasksFile, 'utf-8'))) answers.push(await answered(task));
  writeFileSync(answersFile, JSON.stringify(answers));
} finally {
  await browser.close();
  rmSync(profile, { recursive: true, force: true });
}

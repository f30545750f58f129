// Uses the page of a site in headless Chromium, as somebody would who sits in front of it.
//
//     CHROMIUM=/usr/bin/chromium node with_site.mjs TASK.json ANSWER.json
//
// TASK: {origin, pid, site, lines, texts, searches: [{model, device, method, fields, texts}], word, gpuText}; pid: of the
// server at `origin`, which is ended for the part without a network; site: its folder. Beside ANSWER.json: pictures of the
// page, light, dark and of a phone's width.

import { createReadStream, mkdtempSync, readFileSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { createServer } from 'node:http';
import { createRequire } from 'node:module';
import { tmpdir } from 'node:os';
import { dirname, extname, join, normalize } from 'node:path';

import { chromium } from 'playwright-core';

const AXE = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf-8');
const FLAGS = ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking'];
const GPU = ['--enable-unsafe-webgpu', '--use-webgpu-adapter=swiftshader'];
const TYPES = {
  '.html': 'text/html', '.js': 'text/javascript', '.mjs': 'text/javascript', '.json': 'application/json',
  '.wasm': 'application/wasm', '.css': 'text/css', '.svg': 'image/svg+xml', '.webmanifest': 'application/manifest+json',
};
const PATIENCE = 240_000; // milliseconds

const [taskFile, answerFile] = process.argv.slice(2);
const task = JSON.parse(readFileSync(taskFile, 'utf-8'));
const out = dirname(answerFile);
const answer = { problems: [], hosts: [], standing: [], searches: {} };

/** A browser of its own, with nothing kept; what its pages complain of, and whom they ask, goes to the answer. */
async function browsing(use, flags = []) {
  const profile = mkdtempSync(join(tmpdir(), 'chromium-'));
  const browser = await chromium.launchPersistentContext(profile, {
    executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium', headless: true, args: [...FLAGS, ...flags],
    chromiumSandbox: false, viewport: { width: 1000, height: 900 },
  });
  browser.setDefaultTimeout(PATIENCE);
  browser.on('request', (request) => answer.hosts.push(new URL(request.url()).host));
  try {
    await use(browser);
  } finally {
    await browser.close();
    rmSync(profile, { recursive: true, force: true, maxRetries: 5 });
  }
}

async function opened(browser, origin) {
  const page = await browser.newPage();
  page.on('console', (message) => {
    if (['error', 'warning'].includes(message.type())) answer.problems.push(`${message.type()}: ${message.text()}`);
  });
  page.on('pageerror', (error) => answer.problems.push(String(error.stack ?? error)));
  await page.exposeFunction('standing', (text) => answer.standing.push(text));
  await page.addInitScript(() => new MutationObserver(() => { // a translation that stands there while a model is loaded
    const [state, shown] = ['state', 'translation'].map((id) => document.getElementById(id)?.textContent ?? '');
    if (state.startsWith('Loading') && shown.trim()) standing(`${state}: ${shown}`);
  }).observe(document, { childList: true, subtree: true, characterData: true }));
  await page.goto(`${origin}/`);
  await ready(page);
  return page;
}

const textOf = (page, id) => page.locator(`#${id}`).textContent();

/** Once a model is open. */
async function ready(page) {
  await page.waitForFunction(() => !document.querySelector('#error').hidden || (
    document.querySelector('#state').textContent === 'Ready' && !document.querySelector('#model').disabled));
  const error = await textOf(page, 'error');
  if (error) throw new Error(`the page says: ${error}`);
}

/** What the page translates a text to: ids, words. */
async function translated(page, text) {
  if (await page.locator('#text').inputValue() !== text) await page.fill('#text', text);
  return finished(page, text);
}

async function finished(page, text) {
  await page.waitForFunction((expected) => !document.querySelector('#error').hidden
    || document.querySelector('#translation').dataset.source === expected, text);
  const box = page.locator('#translation');
  const ids = (await box.getAttribute('data-ids')).split(' ').filter(Boolean).map(Number);
  return { ids, text: await box.textContent(), error: await textOf(page, 'error'), read: await read(page, ids) };
}

/** The table of attention: {columns, rows, shares}; null where the model shows none. */
async function read(page, ids) {
  if (await page.locator('#attention').isHidden()) return null;
  await page.waitForFunction((expected) => document.querySelector('#shares').dataset.ids === expected, ids.join(' '));
  const shares = page.locator('#shares');
  const rows = await shares.locator('tbody tr').all();
  return {
    columns: await shares.locator('thead th').allTextContents(),
    rows: await shares.locator('tbody th').allTextContents(),
    shares: await Promise.all(rows.map(async (row) => (await row.locator('td').allTextContents()).map(Number))),
  };
}

async function choose(page, model, device = 'auto') {
  await page.selectOption('#device', device);
  await ready(page);
  const names = await page.locator('#model option').allTextContents();
  await page.selectOption('#model', String(names.findIndex((name) => name.startsWith(`${model}, `))));
  await ready(page);
}

async function searched(page, { model, device, method, fields = {}, texts }) {
  await choose(page, model, device);
  await page.selectOption('#method', method);
  for (const [id, value] of Object.entries(fields)) {
    await page.fill(`#${id}`, String(value));
    await page.locator(`#${id}`).blur();
  }
  const found = [];
  for (const text of texts) found.push(await translated(page, text));
  const others = await page.locator('#other-rows tr td:last-child').allTextContents();
  return { found, others, facts: await page.locator('#facts').innerText() };
}

async function violations(page) {
  await page.evaluate(AXE);
  const found = await page.evaluate(() => globalThis.axe.run());
  return found.violations.map(({ id, nodes }) => `${id}: ${nodes.map(({ html }) => html).join(' ')}`);
}

/** Clicks the word, then the second of its alternatives. */
async function alternatives(page, text) {
  await page.locator('#translation button').nth(task.word).focus();
  await page.keyboard.press('Enter');
  await page.locator('#choices button').first().waitFor();
  const found = { choices: await page.locator('#choices button').allTextContents(), said: await textOf(page, 'status') };
  answer.violations.push(...await violations(page));
  await page.screenshot({ path: join(out, 'alternatives.png'), fullPage: true });
  await page.locator('#choices button').nth(1).click();
  const chosen = await finished(page, text);
  await page.locator('#free').click();
  return { ...found, chosen, free: await finished(page, text) };
}

async function withServer(browser) {
  const page = await opened(browser, task.origin);
  answer.isolated = await page.evaluate(() => crossOriginIsolated);
  answer.facts = await page.locator('#facts').innerText();
  answer.violations = await violations(page);
  answer.tokenized = await page.evaluate(async ({ lines, rows }) => {
    const { Tokenizer } = await import('./tokenizer.js');
    const tokenizer = new Tokenizer(await (await fetch('tokenizer.json')).json());
    const words = rows.map((ids) => tokenizer.words(ids).map(({ text }) => text).join(''));
    return { ids: lines.map((line) => tokenizer.encode(line)), texts: rows.map((ids) => tokenizer.decode(ids)), words };
  }, task);
  for (const each of task.searches) answer.searches[each.name] = await searched(page, each);
  answer.violations.push(...await violations(page));
  await page.emulateMedia({ colorScheme: 'dark' });
  answer.violations.push(...await violations(page));
  await page.screenshot({ path: join(out, 'attention.png'), fullPage: true });
  await page.emulateMedia({ colorScheme: 'light' });
  await choose(page, task.searches[0].model);
  await page.selectOption('#method', 'greedy');
  const [text] = task.searches[0].texts;
  await translated(page, text);
  answer.alternatives = await alternatives(page, text);
  await page.click('#compare');
  await page.waitForFunction(() => document.querySelector('#status').textContent.includes('compared'));
  await ready(page);
  answer.compared = await page.locator('#compare-rows tr').allInnerTexts();
  for (const [name, scheme, width] of [['light', 'light', 1000], ['dark', 'dark', 1000], ['phone', 'light', 390]]) {
    await page.emulateMedia({ colorScheme: scheme });
    await page.setViewportSize({ width, height: 844 });
    answer.violations.push(...await violations(page));
    await page.screenshot({ path: join(out, `${name}.png`), fullPage: true });
  }
  answer.sideways = await page.evaluate(() => document.documentElement.scrollWidth > innerWidth);
  await page.click('#keep');
  await page.waitForFunction(() => document.querySelector('#kept').textContent.startsWith('All files are kept'));
  await page.close();
}

/** The same browser once the server has gone. */
async function withoutServer(browser) {
  process.kill(task.pid, 'SIGTERM');
  while (await fetch(task.origin).then(() => true, () => false)) await new Promise((next) => setTimeout(next, 100));
  const page = await opened(browser, task.origin);
  const models = await page.locator('#model option').allTextContents();
  answer.offline = { models: models.length, isolated: await page.evaluate(() => crossOriginIsolated), found: {} };
  for (const each of task.searches.slice(0, 2)) answer.offline.found[each.name] = await searched(page, each);
}

/** A server that sends no header of ours: at first one thread, then those that the service worker makes possible. */
async function plainServer(use) {
  const server = createServer((request, response) => {
    const path = normalize(new URL(request.url, 'http://localhost').pathname);
    const file = join(task.site, path === '/' ? 'index.html' : path);
    if (!statSync(file, { throwIfNoEntry: false })?.isFile()) return response.writeHead(404).end();
    response.writeHead(200, { 'Content-Type': TYPES[extname(file)] ?? 'application/octet-stream' });
    return createReadStream(file).pipe(response);
  });
  await new Promise((listening) => server.listen(0, '127.0.0.1', listening));
  try {
    await use(`http://127.0.0.1:${server.address().port}`);
  } finally {
    server.closeAllConnections();
    server.close();
  }
}

async function withoutHeaders(browser, origin) {
  const text = task.searches[0].texts[0];
  answer.visits = [];
  for (let visit = 0; visit < 2; visit++) {
    const page = await opened(browser, origin);
    const { ids } = await translated(page, text);
    const said = await page.locator('#one-thread').isVisible() ? await textOf(page, 'one-thread') : '';
    answer.visits.push({ ids, said, facts: await page.locator('#facts').innerText() });
    await page.close();
  }
}

async function onGpu(browser, origin) {
  const page = await opened(browser, origin);
  answer.gpu = {};
  for (const method of ['greedy', 'beam']) {
    await page.selectOption('#method', method);
    answer.gpu[method] = { ...await translated(page, task.gpuText), facts: await page.locator('#facts').innerText() };
  }
}

try {
  await plainServer(async (origin) => {
    await browsing((browser) => withoutHeaders(browser, origin));
    await browsing((browser) => onGpu(browser, origin), GPU);
  });
  await browsing(async (browser) => {
    await withServer(browser);
    await withoutServer(browser);
  });
} catch (error) {
  answer.failed = String(error.stack ?? error);
}
answer.hosts = [...new Set(answer.hosts)];
writeFileSync(answerFile, JSON.stringify(answer));

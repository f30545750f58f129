// Answers tasks in a page of headless Chromium, which gets all it loads from this process, on localhost.
//
//     CHROMIUM=/usr/bin/chromium node with_chromium.mjs TASKS.json ANSWERS.json
//
// Tasks and answers as in ../with_optimum.py; page.mjs has their kinds. A task with `threads` above 1 gets a page that is
// cross-origin isolated, without which a browser has no threads with shared memory. Beside ANSWERS.json: browser.log with
// what the pages said and asked for, and a picture of the page for each task that failed.

import { createReadStream, mkdtempSync, readFileSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { createServer } from 'node:http';
import { tmpdir } from 'node:os';
import { basename, dirname, extname, join, normalize } from 'node:path';

import { chromium } from 'playwright-core';

const HERE = import.meta.dirname;
const TYPES = {
  '.html': 'text/html', '.js': 'text/javascript', '.mjs': 'text/javascript', '.json': 'application/json', '.wasm': 'application/wasm',
};
const PAGE = '<!doctype html><meta charset="utf-8"><title>consumers</title><pre></pre><script type="module" src="/page.mjs"></script>';
const ISOLATION = { 'Cross-Origin-Opener-Policy': 'same-origin', 'Cross-Origin-Embedder-Policy': 'require-corp' };
// The last two: WebGPU without a graphics card, computed on the CPU by SwiftShader, which comes with Chromium.
const FLAGS = [
  '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking',
  '--disable-component-update', '--disable-sync', '--enable-unsafe-webgpu', '--use-webgpu-adapter=swiftshader',
];

/** Serves the page, node_modules and /models/NAME of `folders` ({NAME: folder}); resolves to the origin. */
function serve(folders, headers) {
  const server = createServer((request, response) => {
    const path = normalize(decodeURIComponent(new URL(request.url, 'http://localhost').pathname));
    const send = (status, type, more = {}) => response.writeHead(status, { 'Content-Type': type, ...headers, ...more });
    if (path === '/') return send(200, 'text/html').end(PAGE);
    const [, place, name, ...rest] = path.split('/');
    const file = place === 'models' ? folders[name] && join(folders[name], ...rest) : join(HERE, path);
    const found = file && statSync(file, { throwIfNoEntry: false });
    if (!found?.isFile()) return send(404, 'text/plain').end(`no ${path}`);
    send(200, TYPES[extname(file)] ?? 'application/octet-stream', { 'Content-Length': found.size });
    createReadStream(file).pipe(response);
  });
  return new Promise((resolve) => {
    server.listen(0, '127.0.0.1', () => resolve({ server, origin: `http://127.0.0.1:${server.address().port}` }));
  });
}

const [tasksFile, answersFile] = process.argv.slice(2);
const out = dirname(answersFile);
const tasks = JSON.parse(readFileSync(tasksFile, 'utf-8'));
// Served under a name of its own each: two folders may have the same last name.
const folders = Object.fromEntries([...new Set(tasks.map((task) => task.folder))].map((folder, i) => [`${i}-${basename(folder)}`, folder]));
const nameOf = (folder) => Object.keys(folders).find((name) => folders[name] === folder);
const sites = [await serve(folders, {}), await serve(folders, ISOLATION)];
const log = [];
const answers = {};
const profile = mkdtempSync(join(tmpdir(), 'chromium-'));
const browser = await chromium.launchPersistentContext(profile, {
  executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium', headless: true, args: FLAGS, chromiumSandbox: false,
});
try {
  const { origin: here } = sites[0];
  await browser.route((url) => !sites.some(({ origin }) => url.origin === origin), (route) => {
    log.push(`refused: ${route.request().url()} (these tests use no network)`);
    return route.abort();
  });
  for (const { name, folder, ...task } of tasks) {
    const page = await browser.newPage();
    const [mine, began] = [log.length, Date.now()];
    page.on('console', (message) => log.push(`${name}: ${message.type()}: ${message.text()}`));
    page.on('pageerror', (error) => log.push(`${name}: ${error.stack ?? error}`));
    page.on('response', (response) => log.push(`${name}: ${response.status()} ${response.url()}`));
    try {
      await page.goto((task.threads > 1 ? sites[1].origin : here) + '/');
      await page.waitForFunction(() => globalThis.answer !== undefined, undefined, { timeout: 60_000 });
      answers[name] = { value: await page.evaluate((given) => globalThis.answer(given), { folder: nameOf(folder), ...task }) };
    } catch (error) {
      const picture = join(out, `${name.replaceAll(/[^\w.-]+/g, '-')}.png`);
      await page.screenshot({ path: picture }).catch(() => {});
      answers[name] = { error: [error.stack ?? error, ...log.slice(mine).slice(-20), `picture: ${picture}`].join('\n') };
    }
    log.push(`${name}: ${(Date.now() - began) / 1000} s`);
    await page.close();
  }
} finally {
  writeFileSync(join(out, 'browser.log'), log.join('\n') + '\n');
  await browser.close();
  for (const { server } of sites) server.close();
  rmSync(profile, { recursive: true, force: true, maxRetries: 5 });
}
writeFileSync(answersFile, JSON.stringify(answers));

// What pages are measured in: a server of folders on this machine, and headless Chromium with nothing kept.
//
//     CHROMIUM=/usr/bin/chromium

import { createReadStream, mkdtempSync, rmSync, statSync } from 'node:fs';
import { createServer } from 'node:http';
import { tmpdir } from 'node:os';
import { extname, join, normalize } from 'node:path';
import { pathToFileURL } from 'node:url';

const TYPES = {
  '.html': 'text/html', '.js': 'text/javascript', '.mjs': 'text/javascript', '.json': 'application/json',
  '.wasm': 'application/wasm', '.css': 'text/css', '.svg': 'image/svg+xml', '.webmanifest': 'application/manifest+json',
};
const ISOLATION = { 'Cross-Origin-Opener-Policy': 'same-origin', 'Cross-Origin-Embedder-Policy': 'require-corp' };
const FLAGS = ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking'];

/** Folders by the first part of a path, and /empty, a page of nothing, isolated so that wasm has threads. */
export async function serve(places) {
  const server = createServer((request, response) => {
    const path = normalize(decodeURIComponent(new URL(request.url, 'http://localhost').pathname));
    const [, place, ...rest] = path.split('/');
    if (place === 'empty') return response.writeHead(200, { ...ISOLATION, 'Content-Type': 'text/html' }).end('<!doctype html>');
    const file = places[place] && join(places[place], ...rest);
    const found = file && statSync(file, { throwIfNoEntry: false });
    if (!found?.isFile()) return response.writeHead(404, ISOLATION).end();
    const type = TYPES[extname(file)] ?? 'application/octet-stream';
    response.writeHead(200, { ...ISOLATION, 'Content-Type': type, 'Content-Length': found.size });
    return createReadStream(file).pipe(response);
  });
  await new Promise((listening) => server.listen(0, '127.0.0.1', listening));
  return { origin: `http://127.0.0.1:${server.address().port}`, close: () => server.close() };
}

/** Uses a browser with nothing kept. modules: the folder of packages, playwright-core among them. */
export async function browsing(modules, use) {
  const { chromium } = await import(pathToFileURL(join(modules, 'playwright-core', 'index.mjs')));
  const profile = mkdtempSync(join(tmpdir(), 'chromium-'));
  const browser = await chromium.launchPersistentContext(profile, {
    executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium', headless: true, args: FLAGS, chromiumSandbox: false,
  });
  browser.setDefaultTimeout(0);
  try {
    return await use(browser);
  } finally {
    await browser.close();
    rmSync(profile, { recursive: true, force: true, maxRetries: 5 });
  }
}

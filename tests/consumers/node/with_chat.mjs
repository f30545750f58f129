// Chats with the page of a decoder's site in headless Chromium.
//
//     CHROMIUM=/usr/bin/chromium node with_chat.mjs TASK.json ANSWER.json
//
// TASK: {origin, models (names), conversations: [[message, ...]], limit, gpu}. ANSWER: {problems, hosts, violations,
// sideways, found: [{model, device, ids: [conversation: [answer: [id]]], texts}]}. Beside ANSWER.json: pictures.

import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';

import { chromium } from 'playwright-core';

const AXE = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf-8');
const FLAGS = ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking'];
const GPU = ['--enable-unsafe-webgpu', '--use-webgpu-adapter=swiftshader'];
const [taskFile, answerFile] = process.argv.slice(2);
const { origin, models, conversations, limit, gpu } = JSON.parse(readFileSync(taskFile, 'utf-8'));
const answer = { problems: [], hosts: [], violations: [], found: [] };

async function browsing(flags, use) {
  const profile = mkdtempSync(join(tmpdir(), 'chromium-'));
  const browser = await chromium.launchPersistentContext(profile, {
    executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium', headless: true, args: [...FLAGS, ...flags], chromiumSandbox: false,
  });
  browser.setDefaultTimeout(240_000);
  browser.on('request', (request) => answer.hosts.push(new URL(request.url()).host));
  const page = await browser.newPage();
  page.on('pageerror', (error) => answer.problems.push(String(error.stack ?? error)));
  page.on('console', (message) => {
    if (['error', 'warning'].includes(message.type())) answer.problems.push(`${message.type()}: ${message.text()}`);
  });
  try {
    await page.goto(`${origin}/`);
    await ready(page);
    await use(page);
  } finally {
    await browser.close();
    rmSync(profile, { recursive: true, force: true, maxRetries: 5 });
  }
}

async function ready(page) {
  await page.waitForFunction(() => !document.querySelector('#error').hidden || (
    document.querySelector('#state').textContent === 'Ready' && !document.querySelector('#send').disabled));
  const error = await page.locator('#error').textContent();
  if (error) throw new Error(`the page says: ${error}`);
}

async function chatted(page, model, device) {
  await page.selectOption('#device', device);
  await ready(page);
  const names = await page.locator('#model option').allTextContents();
  await page.selectOption('#model', String(names.findIndex((name) => name.startsWith(`${model}, `))));
  await ready(page);
  await page.fill('#limit', String(limit));
  const [ids, texts] = [[], []];
  for (const messages of conversations) {
    for (const [i, message] of messages.entries()) {
      await page.fill('#text', message);
      await page.press('#text', 'Enter');
      await page.locator('.assistant').nth(i).waitFor();
      await ready(page);
    }
    const answers = await page.locator('.assistant').all();
    ids.push(await Promise.all(answers.map(async (each) => (await each.getAttribute('data-ids')).split(' ').map(Number))));
    texts.push(await page.locator('.assistant').allTextContents());
    await page.click('#new');
  }
  answer.found.push({ model, device, ids, texts, facts: await page.locator('#facts').innerText() });
}

async function looked(page) {
  await page.fill('#text', conversations[0][0]);
  await page.press('#text', 'Enter');
  await page.locator('#again').waitFor();
  for (const [name, colorScheme, width] of [['light', 'light', 1000], ['dark', 'dark', 1000], ['phone', 'light', 390]]) {
    await page.emulateMedia({ colorScheme });
    await page.setViewportSize({ width, height: 844 });
    await page.evaluate(AXE);
    const { violations } = await page.evaluate(() => globalThis.axe.run());
    answer.violations.push(...violations.map(({ id, nodes }) => `${id}: ${nodes.map(({ html }) => html).join(' ')}`));
    await page.screenshot({ path: join(dirname(answerFile), `${name}.png`), fullPage: true });
  }
  answer.sideways = await page.evaluate(() => document.documentElement.scrollWidth > innerWidth);
}

try {
  await browsing([], async (page) => {
    for (const model of models) await chatted(page, model, 'wasm');
    await looked(page);
  });
  await browsing(GPU, (page) => chatted(page, gpu, 'webgpu'));
} catch (error) {
  answer.failed = String(error.stack ?? error);
}
answer.hosts = [...new Set(answer.hosts)];
writeFileSync(answerFile, JSON.stringify(answer));

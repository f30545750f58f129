// Asks the page of a site for translations, by languages and with and without its shortlist.
//
//     CHROMIUM=/usr/bin/chromium node with_languages.mjs TASK.json ANSWER.json
//
// TASK: {origin, models (names), texts, pairs: [[source, target]]}. ANSWER: {problems, found: [{model, pair, listed,
// rows: [ids]}]}.

import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

import { chromium } from 'playwright-core';

const FLAGS = ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking'];
const [taskFile, answerFile] = process.argv.slice(2);
const { origin, models, texts, pairs } = JSON.parse(readFileSync(taskFile, 'utf-8'));
const profile = mkdtempSync(join(tmpdir(), 'chromium-'));
const browser = await chromium.launchPersistentContext(profile, {
  executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium', headless: true, args: FLAGS, chromiumSandbox: false,
});
browser.setDefaultTimeout(240_000);
const answer = { problems: [], found: [] };
const page = await browser.newPage();
page.on('pageerror', (error) => answer.problems.push(String(error.stack ?? error)));
const ready = () => page.waitForFunction(() => !document.querySelector('#error').hidden || (
  document.querySelector('#state').textContent === 'Ready' && !document.querySelector('#model').disabled));
await page.goto(`${origin}/`);
await ready();
for (const model of models) {
  const names = await page.locator('#model option').allTextContents();
  await page.selectOption('#model', String(names.findIndex((name) => name.startsWith(`${model}, `))));
  await ready();
  for (const pair of pairs) {
    for (const listed of [true, false]) {
      await page.fill('#text', '');
      await page.selectOption('#sourceLanguage', pair[0]);
      await page.selectOption('#targetLanguage', pair[1]);
      await page.setChecked('#listed', listed);
      const rows = [];
      for (const text of texts) {
        await page.fill('#text', text);
        await page.waitForFunction((expected) => !document.querySelector('#error').hidden
          || document.querySelector('#translation').dataset.source === expected, text);
        answer.problems.push(...[await page.locator('#error').textContent()].filter(Boolean));
        rows.push((await page.locator('#translation').getAttribute('data-ids')).split(' ').filter(Boolean).map(Number));
      }
      answer.found.push({ model, pair, listed, rows });
    }
  }
}
writeFileSync(answerFile, JSON.stringify(answer));
await browser.close();
rmSync(profile, { recursive: true, force: true, maxRetries: 5 });

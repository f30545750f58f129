// Asks axe-core what keeps people from using pages: in headless Chromium, light and dark, on a screen, a
// tablet's and a phone's.
//
//     CHROMIUM=/usr/bin/chromium node with_axe.mjs TASKS.json ANSWERS.json
//
// TASKS: [{page, opened}]: a file or an address, and selectors of what is clicked one after another, the page being asked after each;
// what a summary opens is closed again.
// ANSWERS: for each page the violations, one line each, and what its console said. Beside ANSWERS.json: pictures.

import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { tmpdir } from 'node:os';
import { basename, dirname, join } from 'node:path';
import { pathToFileURL } from 'node:url';

import { chromium } from 'playwright-core';

const AXE = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf-8');
const FLAGS = ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking'];
const SCREENS = { screen: 1280, tablet: 768, phone: 360 };

const [tasksFile, answersFile] = process.argv.slice(2);
const out = dirname(answersFile);
const profile = mkdtempSync(join(tmpdir(), 'chromium-'));
const browser = await chromium.launchPersistentContext(profile, {
  executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium', headless: true, args: FLAGS, chromiumSandbox: false,
});

async function violations(page, where) {
  await page.waitForFunction(() => !document.getElementById('walk') || document.documentElement.dataset.ready);
  await page.evaluate(() => Promise.all(document.getAnimations().map((animation) => animation.finished)));
  // All rules; but where they hold is not written out, which takes as long as asking.
  const found = await page.evaluate(() => globalThis.axe.run({ resultTypes: ['violations'] }).then(({ violations }) => violations));
  return found.flatMap(({ id, nodes }) => nodes.map(({ target, failureSummary }) => (
    `${where}: ${id}: ${target.join(' ')}: ${failureSummary.replaceAll(/\s+/g, ' ')}`)));
}

async function asked({ page: file, opened }) {
  const answer = { violations: [], problems: [], checks: 0 };
  await Promise.all(['light', 'dark'].map(async (colorScheme) => {
    for (const [screen, width] of Object.entries(SCREENS)) {
      const page = await browser.newPage();
      page.on('console', (message) => message.type() === 'error' && answer.problems.push(message.text()));
      page.on('pageerror', (error) => answer.problems.push(String(error.stack ?? error)));
      await page.emulateMedia({ colorScheme, reducedMotion: 'reduce' });
      await page.setViewportSize({ width, height: 844 });
      await page.goto(file.startsWith('http:') ? file : pathToFileURL(file).href);
      await page.evaluate(AXE);
      for (const selector of ['', ...opened]) {
        if (selector) await page.locator(selector).first().click();
        answer.violations.push(...await violations(page, `${colorScheme}, ${screen}, ${selector || 'at first'}`));
        answer.checks += 1;
        if (selector.endsWith('summary')) await page.locator(selector).first().click(); // which closes it again
      }
      await page.screenshot({ path: join(out, `${basename(file, '.html')}-${colorScheme}-${screen}.png`) });
      await page.close();
    }
  }));
  return answer;
}

try {
  const answers = [];
  for (const task of JSON.parse(readFileSync(tasksFile, 'utf-8'))) answers.push(await asked(task));
  writeFileSync(answersFile, JSON.stringify(answers));
} finally {
  await browser.close();
  rmSync(profile, { recursive: true, force: true, maxRetries: 5 });
}

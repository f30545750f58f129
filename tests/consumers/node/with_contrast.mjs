// Photographs the figures of pages in headless Chromium, light and dark, and says where their texts and lines are.
//
//     CHROMIUM=/usr/bin/chromium node with_contrast.mjs TASKS.json ANSWERS.json
//
// TASKS: [{page, figures}]: a file, and a selector. ANSWERS: of each page [{scheme, figure, picture, scale, texts: [{text, box}],
// lines: [{stroke, points}]}], picture being a file beside ANSWERS.json, all places in CSS pixels within it.

import { readFileSync, writeFileSync } from 'node:fs';
import { basename, dirname, join } from 'node:path';
import { pathToFileURL } from 'node:url';

import { chromium } from 'playwright-core';

const FLAGS = ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking'];
const SCALE = 3;

const [tasksFile, answersFile] = process.argv.slice(2);
const out = dirname(answersFile);
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium', headless: true, args: FLAGS, chromiumSandbox: false });

/** Texts and lines of a figure. Grids and frames are decoration: they have the colour --line. */
function seen(figure) {
  const { left, top } = figure.getBoundingClientRect();
  const frame = (figure.closest('.wide') ?? figure).getBoundingClientRect(); // what is past it is scrolled to
  const inside = (x, y) => x >= frame.left && x <= frame.right && y >= frame.top && y <= frame.bottom;
  const probe = document.body.appendChild(document.createElement('i'));
  probe.style.color = 'var(--line)';
  const plain = ['none', getComputedStyle(probe).color];
  probe.remove();
  const texts = [];
  const walker = document.createTreeWalker(figure, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim();
    const range = document.createRange();
    range.selectNodeContents(walker.currentNode);
    const { x, y, width, height } = range.getBoundingClientRect();
    const own = getComputedStyle(walker.currentNode.parentElement);
    if (text && width && height && own.visibility === 'visible' && inside(x, y) && inside(x + width, y + height)) texts.push({ text, box: [x - left, y - top, width, height] });
  }
  const lines = [...figure.querySelectorAll('path, line, polyline, circle, rect')].flatMap((each) => {
    const { stroke } = getComputedStyle(each);
    if (plain.includes(stroke) || each.closest('defs, marker, clipPath') || !each.getTotalLength()) return [];
    const [length, matrix] = [each.getTotalLength(), each.getScreenCTM()];
    const points = [0.03, 0.2, 0.35, 0.5, 0.65, 0.8, 0.97].map((share) => each.getPointAtLength(share * length).matrixTransform(matrix))
      .filter(({ x, y }) => inside(x, y)).map(({ x, y }) => [x - left, y - top]);
    return points.length ? [{ stroke, points }] : [];
  });
  return { texts, lines };
}

async function photographed({ page: file, figures }) {
  const answer = [];
  for (const colorScheme of ['light', 'dark']) {
    const page = await browser.newPage({ colorScheme, deviceScaleFactor: SCALE, reducedMotion: 'reduce', viewport: { width: 1280, height: 1400 } });
    await page.goto(pathToFileURL(file).href);
    await page.waitForFunction(() => !document.getElementById('walk') || document.documentElement.dataset.ready);
    await page.addStyleTag({ content: '#sticky, #now { position: static !important; }' }); // they would lie over figures
    for (const [n, figure] of (await page.locator(figures).all()).entries()) {
      if (!await figure.isVisible()) continue;
      await figure.evaluate((each) => each.scrollIntoView({ block: 'start' }));
      const name = await figure.evaluate((each) => each.getAttribute('aria-label') ?? each.querySelector('[aria-label]')?.getAttribute('aria-label') ?? each.className);
      const picture = join(out, `${basename(file, '.html')}-${colorScheme}-${n}.png`);
      await page.screenshot({ path: picture, clip: await figure.boundingBox() });
      answer.push({ scheme: colorScheme, figure: name, picture, scale: SCALE, ...await figure.evaluate(seen) });
    }
    await page.close();
  }
  return answer;
}

try {
  const answers = [];
  for (const task of JSON.parse(readFileSync(tasksFile, 'utf-8'))) answers.push(await photographed(task));
  writeFileSync(answersFile, JSON.stringify(answers));
} finally {
  await browser.close();
}

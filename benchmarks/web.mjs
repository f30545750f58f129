// The browser's side of web.py: opens the page of a site and a page with transformers.js, and lets them take turns.
//
//     CHROMIUM=/usr/bin/chromium node web.mjs TASK.json ANSWER.json

import { readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';

import { browsing, serve } from './chromium.mjs';

const [taskFile, answerFile] = process.argv.slice(2);
const task = JSON.parse(readFileSync(taskFile, 'utf-8'));
const LOADS = 3;
const server = await serve({ site: task.site, model: task.model, modules: task.modules });
const { origin } = server;

/** The site's worker, asked as its page asks it. Runs in a page. */
async function openSite({ base, name, threads, first }) {
  const { Client } = await import(new URL('client.js', base));
  const began = performance.now();
  const client = new Client();
  await client.ask('begin', { base });
  const site = await (await fetch(new URL('site.json', base))).json();
  const model = site.models.findIndex((each) => (name === 'search' ? each.kind === 'search' : each.kind === 'steps'));
  const opened = await client.ask('open', { model, device: 'wasm', threads });
  if (opened.threads !== threads) throw new Error(`${opened.threads} threads, not ${threads}`);
  const base0 = { beam: 4, lengthPenalty: 0.6, temperature: 1, topK: 0, topP: 1, seed: 0n, prefix: [] };
  globalThis.run = async (lines, method) => {
    const answers = [];
    const start = performance.now();
    for (const text of lines) answers.push(await client.ask('translate', { text, options: { ...base0, method } }));
    const seconds = (performance.now() - start) / 1000;
    const ids = answers.map((answer) => answer.ids);
    return { ids, tokens: ids.flat().length + ids.length, seconds, memory: answers.at(-1).memory };
  };
  await globalThis.run([first], 'greedy');
  return (performance.now() - began) / 1000;
}

/** transformers.js as its documentation has it. Runs in a page. */
async function openPeer({ origin, threads, first, dtype }) {
  const memories = [];
  WebAssembly.Memory = new Proxy(WebAssembly.Memory, {
    construct(target, given) {
      memories.push(new target(...given));
      return memories.at(-1);
    },
  });
  const began = performance.now();
  const { AutoModelForSeq2SeqLM, AutoTokenizer, env } =
    await import(`${origin}/modules/@huggingface/transformers/dist/transformers.min.js`);
  Object.assign(env, { allowRemoteModels: false, allowLocalModels: true, localModelPath: '/', useBrowserCache: false });
  Object.assign(env.backends.onnx.wasm, { wasmPaths: `${origin}/modules/onnxruntime-web/dist/`, numThreads: threads });
  const tokenizer = await AutoTokenizer.from_pretrained('model');
  const model = await AutoModelForSeq2SeqLM.from_pretrained('model', { device: 'wasm', dtype });
  const { bos_token_id: bos, eos_token_id: eos } = model.config;
  globalThis.run = async (lines) => {
    const ids = [];
    const start = performance.now();
    for (const text of lines) {
      const source = await tokenizer(text);
      const room = Math.min(source.input_ids.dims[1] + 50, model.config.max_position_embeddings);
      const [row] = (await model.generate({ ...source, max_new_tokens: room })).tolist();
      ids.push(row.map(Number).filter((id) => id !== bos && id !== eos));
      tokenizer.decode(ids.at(-1));
    }
    const seconds = (performance.now() - start) / 1000;
    const memory = memories.reduce((sum, { buffer }) => sum + buffer.byteLength, 0);
    return { ids, tokens: ids.flat().length + ids.length, seconds, memory };
  };
  await globalThis.run([first]);
  return (performance.now() - began) / 1000;
}

/** A page with a model that has translated once, and the seconds until then. */
async function opened(browser, name) {
  const page = await browser.newPage();
  await page.goto(`${origin}/empty`);
  const common = { threads: task.threads, first: task.lines[0] };
  const load = name === 'transformers.js'
    ? await page.evaluate(openPeer, { ...common, origin, dtype: task.dtype })
    : await page.evaluate(openSite, { ...common, base: `${origin}/site/`, name });
  return { page, load };
}

try {
  const names = ['transformers.js', 'steps', 'search'];
  const loads = Object.fromEntries(names.map((name) => [name, []]));
  for (let round = 0; round < LOADS; round++) {
    for (const name of names) loads[name].push(await browsing(task.modules, async (browser) => (await opened(browser, name)).load));
  }
  writeFileSync(answerFile, JSON.stringify(await browsing(task.modules, (browser) => measured(browser, names, loads))));
} finally {
  server.close();
}

async function measured(browser, names, loads) {
  const pages = {};
  for (const name of names) pages[name] = await opened(browser, name);
  const engines = {
    'transformers.js': ['transformers.js'],
    'page, step by step': ['steps', 'greedy'],
    'page, search inside': ['search', 'greedy'],
    'page, step by step, beam 4': ['steps', 'beam'],
    'page, search inside, beam 4': ['search', 'beam'],
  };
  const found = Object.fromEntries(Object.entries(engines).map(([name, [page]]) => [name, { loads: loads[page], rounds: [] }]));
  for (let round = -1; round < task.rounds; round++) { // the first warms up
    for (const [name, [of, method]] of Object.entries(engines)) {
      const lines = round < 0 ? task.lines.slice(0, 4) : task.lines;
      const { ids, tokens, seconds, memory } = await pages[of].page.evaluate(([l, m]) => globalThis.run(l, m), [lines, method]);
      if (round >= 0) found[name].rounds.push([tokens, seconds]);
      Object.assign(found[name], { ids, memory });
    }
  }
  const version = (name) => JSON.parse(readFileSync(join(task.modules, name, 'package.json'), 'utf-8')).version;
  const versions = { Chromium: browser.browser()?.version() ?? 'of unknown version' };
  for (const name of ['onnxruntime-web', '@huggingface/transformers']) versions[name] = version(name);
  return { engines: found, versions };
}

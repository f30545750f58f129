// One engine that makes vectors of texts in a page of headless Chromium, by transformers.js on wasm.
//
//     node vectors.mjs NAME FOLDER DTYPE THREADS MODULES
//
// NAME: `pipeline`, its own way with a published model, the mean of the tokens at length 1; or `output`, the vectors
// that the graph of a folder of ours gives. What it is asked and answers is said in vectors.py; its time is the wall's.

import { basename, dirname } from 'node:path';
import { createInterface } from 'node:readline';

import { browsing, serve } from '../chromium.mjs';

const [name, folder, dtype, threads, modules] = process.argv.slice(2);
const server = await serve({ modules, models: dirname(folder) });

/** Runs in a page. */
async function open({ origin, name, folder, dtype, threads }) {
  const { AutoModel, AutoTokenizer, env, pipeline } =
    await import(`${origin}/modules/@huggingface/transformers/dist/transformers.min.js`);
  Object.assign(env, { allowRemoteModels: false, allowLocalModels: true, localModelPath: '/models', useBrowserCache: false });
  Object.assign(env.backends.onnx.wasm, { wasmPaths: `${origin}/modules/onnxruntime-web/dist/`, numThreads: threads });
  if (name === 'pipeline') {
    const extractor = await pipeline('feature-extraction', folder, { device: 'wasm', dtype });
    globalThis.vectors = async (texts) => (await extractor(texts, { pooling: 'mean', normalize: true })).tolist();
  } else {
    const tokenizer = await AutoTokenizer.from_pretrained(folder);
    const model = await AutoModel.from_pretrained(folder, { device: 'wasm', dtype });
    globalThis.vectors = async (texts) => {
      const found = await model(tokenizer(texts, { padding: true, truncation: true }));
      return found.sentence_embedding.tolist();
    };
  }
  globalThis.seconds = async (texts, batch) => {
    const start = performance.now();
    for (let i = 0; i < texts.length; i += batch) await globalThis.vectors(texts.slice(i, i + batch));
    return (performance.now() - start) / 1000;
  };
}

const say = (answer) => process.stdout.write(`${JSON.stringify(answer)}\n`);
await browsing(modules, async (browser) => {
  const page = await browser.newPage();
  await page.goto(`${server.origin}/empty`);
  await page.evaluate(open, { origin: server.origin, name, folder: basename(folder), dtype, threads: Number(threads) });
  say({ ready: true });
  for await (const line of createInterface({ input: process.stdin })) {
    const { texts, batch, vectors } = JSON.parse(line);
    if (vectors) {
      say({ vectors: await page.evaluate((asked) => globalThis.vectors(asked), texts) });
    } else {
      const wall = await page.evaluate(([asked, size]) => globalThis.seconds(asked, size), [texts, batch]);
      say({ wall, cpu: wall });
    }
  }
});
server.close();

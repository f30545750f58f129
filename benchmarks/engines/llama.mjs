// llama.cpp in a process of its own, through node-llama-cpp: `node llama.mjs FILE THREADS MODULES`.
//
// FILE: a GGUF file. MODULES: the node_modules that has node-llama-cpp. It answers as worker.py does about prompts; the
// rows of a batch are sequences of one context, decoded together.

import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { createInterface } from 'node:readline';
import { pathToFileURL } from 'node:url';

const [file, threadCount, modules] = process.argv.slice(2);
const threads = Number(threadCount);
const say = (answer) => process.stdout.write(`${JSON.stringify(answer)}\n`);
const memory = (field) =>
  1024 * Number(readFileSync('/proc/self/status', 'utf8').split(`${field}:`)[1].trim().split(/\s/)[0]);

/** Seconds of the wall's clock and of the processor's. */
function clocks() {
  const { user, system } = process.cpuUsage();
  return [performance.now() / 1e3, (user + system) / 1e6];
}

const since = (start) => clocks().map((now, i) => now - start[i]);

async function answered(model, { prompts, count }) {
  const length = prompts[0].length + count;
  const context = await model.createContext({
    sequences: prompts.length,
    contextSize: length,
    batchSize: 512,
    threads: { ideal: threads, min: threads },
  });
  const rows = prompts.map((prompt) => [context.getSequence(), prompt]);
  let first = null;
  let left = prompts.length;
  const start = clocks();
  const outputs = await Promise.all(
    rows.map(async ([sequence, prompt]) => {
      const ids = [];
      for await (const id of sequence.evaluate(prompt, { temperature: 0, yieldEogToken: true })) {
        ids.push(id);
        if (ids.length === 1) {
          left -= 1;
          if (left === 0) first = since(start);
        }
        if (ids.length === count) break;
      }
      return ids;
    }),
  );
  const total = since(start);
  await context.dispose();
  return { first, total, outputs };
}

try {
  const entry = createRequire(`${modules}/`).resolve('node-llama-cpp');
  const { getLlama, LlamaLogLevel } = await import(pathToFileURL(entry));
  const start = clocks();
  const llama = await getLlama({ gpu: false, build: 'never', maxThreads: threads, logLevel: LlamaLogLevel.disabled });
  const model = await llama.loadModel({ modelPath: file, gpuLayers: 0 });
  say({ load: since(start)[0], resident: memory('VmRSS') });
  for await (const line of createInterface({ input: process.stdin })) {
    const request = JSON.parse(line);
    say(request.memory ? { peak: memory('VmHWM') } : await answered(model, request));
  }
  process.exit(0);
} catch (error) {
  say({ error: String(error.message ?? error).split('\n')[0] });
  process.exit(1);
}

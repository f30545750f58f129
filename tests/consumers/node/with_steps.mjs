// Translates with the modules of the page, its greedy and its beam search, on ONNX Runtime's WebAssembly build, in Node.
//
//     node with_steps.mjs PAGE TASK.json ANSWER.json
//
// Task: {graphs: {encoder, decoder} (files), names, configs ({name: of a site}), rows (of source ids), beam}. Answer:
// {name: {greedy, beam}}.

import { readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

import * as ort from 'onnxruntime-web';

const [page, task, answer] = process.argv.slice(2);
const imported = (name) => import(pathToFileURL(join(page, name)).href);
const [{ StepModel }, { tokens }, { beamSearch }] = await Promise.all(['steps.js', 'greedy.js', 'beam.js'].map(imported));

ort.env.wasm.numThreads = 1;
const { graphs, names, configs, rows, beam } = JSON.parse(readFileSync(task));
const sessions = {};
for (const [name, file] of Object.entries(graphs)) {
  const data = { path: `${file.split('/').at(-1)}_data`, data: readFileSync(`${file}_data`) };
  sessions[name] = await ort.InferenceSession.create(readFileSync(file), { externalData: [data] });
}
const answers = {};
for (const [name, config] of Object.entries(configs)) {
  const model = new StepModel(ort, sessions, config, names);
  model.candidates = config.candidates;
  const forced = config.generation.forced_first;
  const found = { greedy: [], beam: [] };
  for (const row of rows) {
    const ids = [];
    for await (const { id } of tokens(model, row, { method: 'greedy', forced })) ids.push(id);
    found.greedy.push(ids);
    const [best] = await beamSearch(model, row, { beam, lengthPenalty: 0.6, forced, stopped: () => false, heard() {} });
    found.beam.push(best.ids);
  }
  answers[name] = found;
}
writeFileSync(answer, JSON.stringify(answers));

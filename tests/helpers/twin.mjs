// Runs twin.js for twin.py: tasks (JSON, a list) on standard input, an answer for each on standard output.
// node twin.mjs FOLDER_OF_THE_PACKAGE_EXPORT

import fs from 'node:fs';
import path from 'node:path';
import { pathToFileURL } from 'node:url';

const from = (file) => import(pathToFileURL(path.join(process.argv[2], file)));
const { Twin, refusal, rowIds } = await from('explain/live/twin.js');
const { readTensors } = await from('explain/live/safetensors.js');
const { tokens } = await from('web/page/greedy.js');
const { beamSearch } = await from('web/page/beam.js');

const models = {};

function opened(folder) {
  if (!models[folder]) {
    const { buffer, byteOffset, byteLength } = fs.readFileSync(path.join(folder, 'model.safetensors'));
    const config = JSON.parse(fs.readFileSync(path.join(folder, 'config.json'), 'utf8'));
    models[folder] = new Twin(config, readTensors(buffer.slice(byteOffset, byteOffset + byteLength)));
  }
  return models[folder];
}

const ANSWERS = {
  refusal: ({ config }) => refusal(config),

  rowIds: ({ stack, ids }) => rowIds(stack, ids),

  /** {name: {shape, data}} of every point, in their order. */
  points: ({ model: folder, source, target, switches }) => {
    const [model, seen] = [opened(folder), {}];
    const watch = (name, array, shape) => { seen[name] = { shape, data: Array.from(array) }; };
    const memory = source && model.encode(source, { switches, watch }).memory;
    if (target) model.decode(target, memory, { switches, watch });
    return seen;
  },

  /** The logits of each step of greedy decoding over given tokens, `chunks` of them at a time. */
  steps: async ({ model: folder, source, chunks }) => {
    const decoder = await opened(folder).start(source);
    const rows = [];
    for (const ids of chunks) rows.push(...await decoder.step([ids]));
    return rows.map((row) => Array.from(row));
  },

  greedy: async ({ model: folder, source, switches, prefix = [] }) => {
    const found = [];
    for await (const each of tokens(opened(folder).with(switches), source, { prefix })) found.push(each);
    return found;
  },

  beam: ({ model: folder, source, ...options }) => (
    beamSearch(opened(folder), source, { ...options, stopped: () => false, heard: () => {} })
  ),
};

const answers = [];
for (const { kind, ...task } of JSON.parse(fs.readFileSync(0, 'utf8'))) answers.push(await ANSWERS[kind](task));
process.stdout.write(JSON.stringify(answers));

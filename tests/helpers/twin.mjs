// Runs twin.js for twin.py: tasks (JSON, a list) on standard input, an answer for each on standard output.
// A task's `package` is the folder of the package export whose scripts it is for.

import fs from 'node:fs';
import path from 'node:path';
import { pathToFileURL } from 'node:url';

const [packages, models] = [{}, {}];

async function scripts(folder) {
  const from = (file) => import(pathToFileURL(path.join(folder, file)));
  const files = ['explain/live/twin.js', 'explain/live/safetensors.js', 'web/page/greedy.js', 'web/page/beam.js'];
  return packages[folder] ??= Object.assign({}, ...await Promise.all(files.map(from)));
}

function opened({ Twin, readTensors }, folder) {
  const { buffer, byteOffset, byteLength } = fs.readFileSync(path.join(folder, 'model.safetensors'));
  const config = JSON.parse(fs.readFileSync(path.join(folder, 'config.json'), 'utf8'));
  return new Twin(config, readTensors(buffer.slice(byteOffset, byteOffset + byteLength)));
}

/** A model with what searches heed. */
const heeding = (model, generation) => Object.assign(model, { config: { ...model.config, generation } });

const ANSWERS = {
  refusal: ({ refusal }, { config }) => refusal(config),

  rowIds: ({ rowIds }, { stack, ids }) => rowIds(stack, ids),

  /** {name: {shape, data}} of every point, in their order, or of those that `names` says. */
  points: (_, { model, source, target, switches, names }) => {
    const seen = {};
    const watch = (name, array, shape) => {
      if (!names || names.includes(name)) seen[name] = { shape, data: Array.from(array) };
    };
    const memory = source && model.encode(source, { switches, watch }).memory;
    if (target) model.decode(target, memory, { switches, watch });
    return seen;
  },

  /** The logits after each token, `chunks` of them read at a time. */
  steps: async (_, { model, source, chunks }) => {
    const decoder = await model.start(source);
    const rows = [];
    for (const ids of chunks) rows.push(...await decoder.step([ids]));
    return rows.map((row) => Array.from(row));
  },

  greedy: async ({ tokens }, { model, source, switches, generation, prefix = [] }) => {
    const found = [];
    for await (const each of tokens(heeding(model.with(switches), generation), source, { prefix })) found.push(each);
    return found;
  },

  beam: ({ beamSearch }, { model, source, generation, ...options }) => (
    beamSearch(heeding(model.with({}), generation), source, { ...options, stopped: () => false, heard: () => {} })
  ),
};

const answers = [];
for (const { kind, package: folder, model, ...task } of JSON.parse(fs.readFileSync(0, 'utf8'))) {
  const found = await scripts(folder);
  if (model) task.model = models[folder + model] ??= opened(found, model);
  answers.push(await ANSWERS[kind](found, task));
}
process.stdout.write(JSON.stringify(answers));

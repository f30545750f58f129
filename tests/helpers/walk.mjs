// Draws stations of the walk for walk.py, without a browser: tasks (JSON, a list) on standard input, an answer for each on
// standard output. A task: {spec: a model as payload.py gives it, words, text, find, state, stations}.

import fs from 'node:fs';
import path from 'node:path';
import { pathToFileURL } from 'node:url';

const { package: folder, tasks } = JSON.parse(fs.readFileSync(0, 'utf8'));
const from = (file) => import(pathToFileURL(path.join(folder, 'explain/walk', file)));
const { Live } = await from('models.js');
const { placed, viewOf } = await from('view.js');
const attention = await from('attention_stations.js');
const found = Object.assign({}, attention, ...await Promise.all(['first_stations.js', 'layer_stations.js', 'output_stations.js', 'breaking.js'].map(from)));
const { seen, switchesOf } = found;
const { moreOf } = await from('more.js');
const { entry, footer } = await from('words.js');

const START = { stack: 'encoder', word: 0, step: 0, layer: 0, head: 0, column: 0, key: null, temperature: 1, beam: 4, alpha: 0.6, off: {} };
const [models, passes] = [new Map(), new Map()];

async function answer({ spec, words, text, find, state: chosen, stations, station, term, links = {} }) {
  if (!models.has(spec.title)) models.set(spec.title, new Live(spec));
  const model = models.get(spec.title);
  const key = `${spec.title}: ${text}`;
  if (!passes.has(key)) passes.set(key, await model.read(text));
  const pass = passes.get(key);
  const state = { ...START, ...chosen };
  Object.assign(state, placed(pass, state, find ?? {}));
  const off = Object.keys(state.off).length > 0;
  const v = { ...viewOf(model, pass, state), tree: null, said: words, turns: '', seen: off ? await seen(model, pass, state.off, words.surer) : '' };
  const part = attention.attentionOf(v, 'self_attention');
  return {
    state,
    footer: station ? footer(words.stations[station], links) : '',
    entry: term ? entry(term, words.glossary[term], links) : '',
    pieces: pass.pieces,
    said: attention.looksAt(v, part),
    bodies: Object.fromEntries(stations.map((name) => [name, found[name].body(v)])),
    whole: { output: pass.output, logP: pass.logP },
    now: off ? await model.written(text, switchesOf(state.off)) : null,
    maps: Object.fromEntries(Object.entries(moreOf(model, pass, null, true).maps.kinds).map(([kind, { named }]) => [kind, named])),
  };
}

const answers = [];
for (const task of tasks) answers.push(await answer(task));
process.stdout.write(JSON.stringify(answers));

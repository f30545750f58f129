// A recorded pass of any model, and the stations that only recorded models have.

import { readTensors } from '../live/safetensors.js';
import { Twin } from '../live/twin.js';
import { derived, escaped, fold, number, strip, table } from '../../../mlx_transformer/page/kit.js';
import { position } from './first_stations.js';
import { dense, FORMULAS, given, headOf, ofText } from './head_station.js';
import { normSteps } from './layer_stations.js';
import { bytesOf, computed } from './models.js';
import { logits } from './output_stations.js';
import { others } from './others.js';
import { Pass } from './pass.js';
import { kindsOf } from './words.js';

/** Unpack recorded arrays [{shape, rows, bits, values}] by name, and the names of equal arrays, to {name: {data,
 * shape, rows}}. */
function recordedPoints({ arrays, equal }) {
  const found = {};
  for (const [name, { shape, rows, bits, values }] of Object.entries(arrays)) {
    const raw = bytesOf(values);
    const data = bits === 32 ? Float64Array.from(new Float32Array(raw.buffer)) : halves(raw);
    found[name] = { data, shape, rows };
  }
  for (const [name, [other, shape]] of Object.entries(equal)) found[name] = { ...found[other], shape };
  return found;
}

/** float16 to float64, with the reader of weights. */
function halves(raw) {
  const header = new TextEncoder().encode(JSON.stringify({ x: { dtype: 'F16', shape: [raw.length / 2], data_offsets: [0, raw.length] } }));
  const file = new Uint8Array(8 + header.length + raw.length);
  new DataView(file.buffer).setBigUint64(0, BigInt(header.length), true);
  file.set(header, 8);
  file.set(raw, 8 + header.length);
  return readTensors(file.buffer).x.data;
}

/** Compare the points of a pass with the page's own engine: for each its size, and both values at the largest
 * difference. */
function compared(points, own) {
  return Object.keys(points).filter((name) => name in own).map((name) => {
    const [ours, theirs] = [own[name].data, points[name].data];
    const gap = (n) => (ours[n] === theirs[n] ? 0 : Math.abs(ours[n] - theirs[n])); // both may be -Infinity
    let most = 0;
    for (let n = 1; n < theirs.length; n++) if (!(gap(n) <= gap(most))) most = n; // the negation also finds NaN
    return { name, count: theirs.length, here: theirs[most], own: ours[most], gap: gap(most) };
  });
}

/** The comparison as HTML. */
function proof(all) {
  const [worst] = all.toSorted((a, b) => b.gap - a.gap);
  const rows = all.map(({ name, count, here, own, gap }) => [escaped(name), count.toLocaleString('en'), derived(here, `graph ${name}`, 6), derived(own, `own ${name}`, 6), derived(gap, `gap ${name}`)]);
  return `<p class="note">Beside the page's own engine, JavaScript in float64 with the same weights: ${all.length} points, `
    + `${all.reduce((sum, { count }) => sum + count, 0).toLocaleString('en')} numbers, the largest difference ${derived(worst.gap, 'largest')}, at ${escaped(worst.name)}.</p>`
    + fold('each point, where both differ most', table(['point', 'numbers', 'the graph', 'the page\'s engine', 'difference'], rows, { label: 'points of the graphs beside those of the page\'s engine' }));
}

/** A recorded pass; or, if the page names a module that runs the model, a pass over the typed text. */
export class Recorded {
  constructor(spec) {
    Object.assign(this, { spec, config: spec.config, live: false, vocabulary: spec.config.vocab_size });
    this.parameters = Object.fromEntries(Object.entries(recordedPoints({ arrays: spec.parameters, equal: {} })).map(([name, { data }]) => [name, data]));
  }

  text(id) {
    return this.spec.texts[id] ?? `#${id}`;
  }

  async read(text) {
    const { spec } = this;
    if (spec.module) Object.assign(spec, await (await import(spec.module)).read(text));
    if (spec.beside) {
      this.twin ??= new Twin(this.config, readTensors(bytesOf(spec.beside).buffer));
      document.getElementById('beside').innerHTML = proof(compared(spec.points, computed(this.twin, spec.tokens)));
    }
    return new Pass(this.config, spec.module ? spec.points : recordedPoints(spec.points), spec.tokens, spec.pieces, { text: spec.text, output: spec.output, given: spec.given });
  }
}

const words = ({ pass: { config } }) => headOf(config).kind === 'vocabulary';

const PLACES = { learned: 'x = word + P[pos]', rotary: 'x = word', relative: 'x = word', relative_layers: 'x = word', none: 'x = word' };

/** The sum at the input: word, token type (in which of two texts it is), learned position. */
function sumOf(v) {
  const { config } = v.pass;
  const name = `${v.stack}.embedding`;
  const from = `${name}.${v.scaled ? 'scaled' : 'rows'}`;
  const [before, after] = [v.pass.row(from, v.i), v.pass.row(name, v.i)];
  const type = v.model.spec.types?.[v.i] ?? 0;
  const kind = v.parameter('token_type_embedding.weight')?.subarray(type * after.length, (type + 1) * after.length);
  const place = config.positions === 'learned' ? after.map((value, j) => value - before[j] - (kind?.[j] ?? 0)) : null;
  const c = v.c % after.length;
  const speeds = v.model.spec.turns?.[v.stack] ?? [];
  const turned = speeds.length ? strip('turn of each pair, in radians', speeds.map((speed) => speed * v.i)) : '';
  const terms = [number(before[c], from, `${v.i},${c}`), ...[[kind, 'kind'], [place, 'place']].filter(([each]) => each).map(([each, name]) => derived(each[c], name))];
  return `${v.said.positions[config.positions] ? `<p>${v.said.positions[config.positions]}</p>` : ''}${strip('word', before, { point: from, index: v.i, lit: v.c })}`
    + (kind ? strip(`+ kind of token: ${type ? 'second' : 'first'} text`, kind, { lit: c }) : '') + (place ? strip('+ place', place, { lit: c }) : '')
    + strip('= input', after, { point: name, index: v.i, lit: v.c })
    + `<p class="cell">column ${c}: ${terms.join(' + ')} = ${number(after[c], name, `${v.i},${c}`)}</p>${turned}`;
}

/** The norm at the start of the stack. */
const normed = (v) => (v.pass.config.embedding_norm
  ? `<p>A norm of it is what the first layer reads:</p>${normSteps(v, v.pass.row(`${v.stack}.embedding`, v.i), `${v.stack}.embedding_norm`, v.c % v.shape.d)}` : '');

/** Stations that replace the station of the same name. */
const stations = {
  position: {
    ...position,
    formula: (v) => PLACES[v.pass.config.positions] ?? position.formula(v),
    body: (v) => (v.pass.config.positions in PLACES && v.pass.has(`${v.stack}.embedding.rows`) ? sumOf(v) : position.body(v)) + normed(v),
  },
  logits: {
    ...logits,
    formula: (v) => (words(v) ? logits.formula(v) : FORMULAS[headOf(v.pass.config).kind]),
    controls: (v) => (words(v) ? logits.controls(v) : ''),
    body: (v) => (words(v) ? `${v.pass.has('head') ? dense(v).html : ''}${logits.body(v)}` : given(v)) + (v.model.spec.embedding ? ofText(v, v.model.spec.embedding) : ''),
  },
};

/** The kinds that a recorded model belongs to, for texts that differ from the usual. */
const kinds = (spec) => ['recorded', headOf(spec.config).kind, ...kindsOf(spec.config), spec.embedding ? 'embedding' : ''];

Object.assign(others, { Recorded, stations, kinds });

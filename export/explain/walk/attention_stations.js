// Attention, one head of one layer: queries, keys and values; one cell; the weighted sum; the heads side by side.

import { bar, derived, escaped, fold, largest, map, mapKey, number, products, short, strip, sum, table } from '../../../mlx_transformer/page/kit.js';
import { bits, dot, mostOf, softmax } from './pass.js';
import { words } from './words.js';

const column = (matrix, width, c) => matrix.subarray(c * width, (c + 1) * width); // for x W^T: row c of W

/** One attention: its points' names, its rows and columns, the tokens of queries and keys. A query of the decoder is
 * labelled by the token written from it; keys and values are labelled by the token read. */
export function attentionOf(v, part) {
  const name = `${v.shape.layer(v.l)}.${part}`;
  const cross = part === 'cross_attention';
  const group = v.shape.heads / v.shape.kvHeads;
  const looked = cross ? v.source : v.read;
  const window = v.shape.window(v.l) ?? Infinity;
  return {
    name,
    of: (point) => `${name}.${point}`,
    row: (point, ...index) => v.pass.row(`${name}.${point}`, ...index),
    cross,
    shape: v.shape,
    kv: Math.floor(v.h / group), // key/value head of this query head
    looked,
    allowed: (j, i = v.i) => cross || (v.stack === 'encoder' ? Math.abs(i - j) <= window : v.off.mask || (j <= i && i - j < window)),
  };
}

/** A sentence about a row of weights, as HTML. */
export function looksAt(v, a) {
  const weights = a.row('weights', v.h, v.i);
  const most = mostOf(weights);
  return `${escaped(`${v.who} looks most at ‹${a.looked[most]}›`)}, ${number(weights[most], a.of('weights'), `${v.h},${v.i},${most}`)}`;
}

/** The chosen key of a row, or the key with the largest weight. */
const keyOf = (v, a) => {
  const n = v.pass.shape(a.of('weights')).at(-1);
  return v.key !== null && v.key < n && v.hasRow(a.of('keys'), v.key) ? v.key : mostOf(a.row('weights', v.h, v.i));
};

function qkvBody(v, part) {
  const a = attentionOf(v, part);
  const { dk, dv, d } = v.shape;
  const input = v.shape.input(v.l, part);
  const x = v.pass.row(input, v.i);
  const q = a.row('queries', v.h, v.i);
  const j = a.cross ? keyOf(v, a) : v.i;
  const of = ` of ‹${escaped(a.looked[j])}›`;
  const out = [
    strip('x, what goes in', x, { point: input, index: v.i }),
    strip('query: what I look for', q, { point: a.of('queries'), index: `${v.h},${v.i}`, lit: v.c % dk, kind: 'q' }),
    strip(`key${of}: what I am found by`, a.row('keys', a.kv, j), { point: a.of('keys'), index: `${a.kv},${j}`, lit: v.c % dk, kind: 'k' }),
    strip(`value${of}: what I hand over`, a.row('values', a.kv, j), { point: a.of('values'), index: `${a.kv},${j}`, lit: v.c % dv, kind: 'v' }),
  ];
  if (v.weights && v.pass.has(a.of('query_proj'))) {
    const c = v.h * dk + (v.c % dk);
    const w = column(v.weights[`${a.name}.query_proj.weight`], d, c);
    const bias = v.weights[`${a.name}.query_proj.bias`];
    const terms = [...products(x, w), ...(bias ? [['bias', bias[c]]] : [])];
    out.push(`<p class="cell">number ${v.c % dk} of the query is column ${c} of x W<sup>Q</sup>: each number of x times one of W, added up.</p>`
      + sum(terms, number(v.pass.at(a.of('query_proj'), v.i, c), a.of('query_proj'), `${v.i},${c}`)));
  }
  return out.join('');
}

export const qkv = {
  id: 'qkv',
  formula: (v) => `q = x W<sup>Q</sup>, k = x W<sup>K</sup>, v = x W<sup>V</sup>; ${v.shape.heads} heads of ${v.shape.dk} numbers${v.shape.kvHeads < v.shape.heads ? `, ${v.shape.kvHeads} of keys and values` : ''}`,
  body: (v) => qkvBody(v, 'self_attention'),
};

/** A worked example with two words, whose scores are 112 and 96. */
function thinkingMachines() {
  const [a, b] = [112, 96].map((score) => score / 8);
  const [p, q] = softmax([a, b]);
  return fold('First by hand: two words, “Thinking Machines”, d<sub>k</sub> = 64', table(['', 'q · k', '÷ √64 = 8', 'softmax'], [['Thinking', '112', short(a), short(p, 6)], ['Machines', '96', short(b), short(q, 6)]], { label: 'the worked example' })
    + `<p>e<sup>14</sup> / (e<sup>14</sup> + e<sup>12</sup>) = ${short(p, 6)}. Without the division it would be ${short(1 - softmax([112, 96])[1], 9)}: Machines would be gone.</p>`);
}

/** Which words may be looked at, as a picture, with the switch. */
function maskPicture(v, a) {
  const [side, n] = [Math.max(4, Math.min(16, Math.floor(240 / v.read.length))), v.read.length];
  const squares = [true, false].map((may) => {
    const cells = v.read.flatMap((_, i) => v.read.map((__, j) => (Boolean(a.allowed(j, i)) === may ? `M${j * side + 1} ${i * side + 1}h${side - 1}v${side - 1}h${1 - side}z` : '')));
    return `<path class="${may ? 'may' : 'not'}" d="${cells.join('')}"/>`;
  });
  const seen = v.read.filter((_, j) => a.allowed(j)).length;
  const flip = v.live && v.stack === 'decoder' ? `<button type="button" data-flip="mask">mask ${v.off.mask ? 'on again' : 'off'}</button>` : '';
  return `<figure class="mask"><svg width="${n * side + 2}" height="${n * side + 2}" role="img" aria-label="mask: this row may look at ${seen} of ${n} words">${squares.join('')}`
    + `<rect class="asks" x="1" y="${v.i * side}" width="${n * side}" height="${side}"/></svg><figcaption>mask: blue may be looked at; this row, ${seen} of ${n}</figcaption>${flip}</figure>`;
}

/** Random numbers of mean 0 and deviation 1, the same ones each time. */
function* normals(seed) {
  let state = seed;
  const share = () => { state = (Math.imul(state, 1664525) + 1013904223) >>> 0; return (state + 0.5) / 2 ** 32; };
  for (;;) {
    const [size, turn] = [Math.sqrt(-2 * Math.log(share())), 2 * Math.PI * share()];
    yield size * Math.cos(turn);
    yield size * Math.sin(turn);
  }
}

const [KEYS, DRAWS] = [8, 20];
const rowsOf = new Map();

/** Weights of a random query over random keys of a width, with and without the division, and the gradient Σ w(1 − w), a
 * mean of several draws. */
function randomRow(width) {
  if (rowsOf.has(width)) return rowsOf.get(width);
  const draw = normals(1);
  const vector = () => Array.from({ length: width }, () => draw.next().value);
  const found = { rows: null, gradients: [0, 0] };
  for (let n = 0; n < DRAWS; n++) {
    const query = vector();
    const scores = Array.from({ length: KEYS }, () => dot(query, vector()));
    const rows = [Math.sqrt(width), 1].map((by) => softmax(scores.map((score) => score / by)));
    rows.forEach((row, side) => { found.gradients[side] += row.reduce((sum, w) => sum + w * (1 - w), 0) / DRAWS; });
    found.rows ??= rows;
  }
  rowsOf.set(width, found);
  return found;
}

function whyDivided(v) {
  const { rows, gradients } = randomRow(v.width);
  const lines = ['÷ √d<sub>k</sub>', 'undivided'].map((name, n) => [name, derived(Math.max(...rows[n]), `random ${n}`), derived(gradients[n], `gradient ${n}`)]);
  return `<h3>Why ÷ √d<sub>k</sub>: a random query over ${KEYS} random keys of ${v.width} numbers</h3>${strip('divided', rows[0], { most: 1 })}${strip('undivided', rows[1], { most: 1 })}`
    + table(['scores', 'largest weight', 'what training feels, Σ w(1 − w)'], lines, { label: 'random weights and their gradients' });
}

export function cellBody(v, part) {
  const a = attentionOf(v, part);
  const j = keyOf(v, a);
  const q = a.row('queries', v.h, v.i);
  const k = a.row('keys', a.kv, j);
  const scores = a.row('scores', v.h, v.i);
  const weights = a.row('weights', v.h, v.i);
  const scale = v.off.scale ? 1 : v.pass.config.attention_scale ?? 1 / Math.sqrt(v.shape.dk);
  const product = q.map((x, c) => x * k[c]);
  const most = Math.max(...weights);
  // exp(s - max) equals w / max w, which includes a relative position's bias.
  const e = Array.from(weights, (w) => w / most);
  const total = e.reduce((x, y) => x + y, 0);
  const place = (c) => `${v.h},${v.i},${c}`;
  const bias = v.pass.has(a.of('bias')) ? a.row('bias', v.h, v.i) : null;
  const rows = Array.from(weights, (w, c) => [
    `<span class="tok">${escaped(a.looked[c])}</span>`,
    number(scores[c], a.of('scores'), place(c)),
    ...(bias ? [number(bias[c], a.of('bias'), place(c))] : []),
    a.allowed(c) ? '+ 0' : '+ −∞',
    derived(e[c], `e ${c}`),
    `${number(w, a.of('weights'), place(c))} ${bar(w)}`,
  ]);
  const times = scale === 1 ? ' × 1' : v.pass.config.attention_scale ? ` × ${derived(scale)}` : ` ÷ √${v.shape.dk}`;
  const added = bias ? ' To each score its relative position is added, a number that this head learned for how far apart two places are.' : '';
  return `<p class="cell">${escaped(v.who)}: how much goes to ‹${escaped(a.looked[j])}›? Each number of the query times the one below it in the key:</p>`
    + strip('query', q, { point: a.of('queries'), index: `${v.h},${v.i}`, kind: 'q' })
    + strip(`key of ‹${escaped(a.looked[j])}›`, k, { point: a.of('keys'), index: `${a.kv},${j}`, kind: 'k' })
    + strip('products', product, { kind: 'falls' })
    + sum(products(q, k), `${derived(dot(q, k), 'qk')}${times}${v.pass.config.score_cap ? `, bounded by ${v.pass.config.score_cap},` : ''} = ${number(scores[j], a.of('scores'), place(j))}`, { open: true })
    + `<p class="cell">${added} Then a ${words('[[softmax]]')} over the row: every score less the largest, e to that power, and each its share of the sum ${derived(total, 'total')}. Click a row to work out another cell.</p>`
    + `<div class="beside">${table(['looked at', 'score', ...(bias ? ['relative position'] : []), 'mask', 'e<sup>s − max</sup>', 'weight'], rows, { lit: j, pick: 'key', label: `scores and weights of ${a.cross ? 'cross-attention' : 'self-attention'}` })}${a.cross ? '' : maskPicture(v, a)}</div>`
    + `<p class="said"><b>${looksAt(v, a)}</b> · the row's weights add up to ${derived(weights.reduce((x, y) => x + y, 0), 'row')}, spread ${derived(bits(weights), 'bits', 2)} bits</p>`;
}

const SCALED = ({ attention_scale: scale }) => (scale === 1 ? '' : scale ? ` · ${derived(scale)}` : ' / √<i>d</i><sub>k</sub>');

export const cell = {
  id: 'cell',
  formula: ({ pass: { config } }) => `weight = softmax(q · k${SCALED(config)}${/^relative/.test(config.positions) ? ' + relative position' : ''} + mask)`,
  controls: (v) => `<label class="slide">d<sub>k</sub> of the random ones, 4 to 1,024 <input type="range" id="width" min="2" max="10" step="1" value="${Math.log2(v.width)}"> <output>${v.width}</output></label>`,
  body: (v) => thinkingMachines() + cellBody(v, 'self_attention') + whyDivided(v),
};

export function mixedBody(v, part) {
  const a = attentionOf(v, part);
  const weights = a.row('weights', v.h, v.i);
  const all = Array.from(weights.keys()).filter((j) => v.hasRow(a.of('values'), j)).map((j) => [j, a.row('values', a.kv, j)]);
  const most = Math.max(...all.map(([, values]) => largest(values)));
  const dv = v.shape.dv;
  const c = v.c % dv;
  const context = a.row('context', v.i).subarray(v.h * dv, (v.h + 1) * dv);
  const lines = all.map(([j, values]) => strip(`${number(weights[j], a.of('weights'), `${v.h},${v.i},${j}`)} × ‹${escaped(a.looked[j])}›`, values, {
    point: a.of('values'), index: `${a.kv},${j}`, most, fade: Math.max(0.06, weights[j]).toFixed(2), lit: c, kind: 'v fades',
  }));
  const off = v.headOff(part) ? '<p class="off">This head is switched off: 0 goes on in place of the sum.</p>' : '';
  const terms = all.map(([j, values]) => [`${short(weights[j])}·${short(values[c])}`, weights[j] * values[c]]);
  const total = number(context[c], a.of('context'), `${v.i},${v.h * dv + c}`);
  return `${off}${lines.join('')}${strip('= the sum', context, { point: a.of('context'), index: v.i, from: v.h * dv, lit: c })}`
    + `<p class="cell">number ${c}, down the column:</p>${off ? `<p>${total}</p>` : sum(terms, total, { open: true })}`;
}

export const mixed = {
  id: 'mixed',
  formula: () => 'z = Σ<sub>j</sub> weight<sub>j</sub> v<sub>j</sub>',
  body: (v) => mixedBody(v, 'self_attention'),
};

export const heads = {
  id: 'heads',
  formula: () => 'MultiHead = Concat(z<sub>1</sub>, …, z<sub>h</sub>) W<sup>O</sup>',
  body: (v) => headsBody(v, 'self_attention'),
};

export function headsBody(v, part) {
  const a = attentionOf(v, part);
  const all = v.pass.point(a.of('weights')).rows;
  const maps = Array.from({ length: v.shape.heads }, (_, h) => {
    const weights = a.row('weights', h, v.i);
    const most = mostOf(weights);
    const said = `looks most at ‹${a.looked[most]}›, `;
    const name = a.of('weights');
    const drawn = map(`head ${h + 1}`, all ? all.map((r) => v.labels[r]) : v.labels, a.looked, (r, c) => v.pass.at(name, h, all ? all[r] : r, c),
      { point: name, index: `${h},`, lit: all ? 0 : v.i, rows: all, said: `${v.who} ${said}${short(weights[most])}` });
    const large = h === v.large;
    return `<div class="head${h === v.h ? ' on' : ''}${large ? ' large' : ''}" data-of="${h}"><button type="button" data-head="${h}">head ${h + 1}</button> <button type="button" data-large="${h}" aria-pressed="${large}">larger</button>${drawn}<small>${escaped(said)}${number(weights[most], name, `${h},${v.i},${most}`)}</small></div>`;
  });
  const context = a.row('context', v.i);
  const d = v.shape.d;
  const c = v.c % d;
  const out = v.pass.has(a.name) ? v.pass.row(a.name, v.i) : null;
  let worked = '';
  if (v.weights && out && !v.sublayerOff(part)) {
    const matrix = v.weights[`${a.name}.output_proj.weight`];
    const bias = v.weights[`${a.name}.output_proj.bias`];
    const terms = [...products(context, column(matrix, context.length, c)), ...(bias ? [['bias', bias[c]]] : [])];
    worked = `<p class="cell">column ${c} of what comes out:</p>${sum(terms, number(out[c], a.name, `${v.i},${c}`))}`;
  }
  return `<p class="said">${escaped(v.who)}, in layer ${v.l + 1}:</p><div class="heads">${maps.join('')}</div>${mapKey()}`
    + (v.stack === 'decoder' && !a.cross ? `<p class="key">${v.said.maps}</p>` : '')
    + strip(`the ${v.shape.heads} sums, one after the other`, context, { point: a.of('context'), index: v.i })
    + (out ? strip('times W<sup>O</sup>', out, { point: a.name, index: v.i, lit: c }) : '') + worked;
}

export const cross = {
  id: 'cross',
  formula: () => 'q from the decoder; k, v from the encoder\'s output',
  body(v) {
    const word = v.at('decoder', v.step);
    return [headsBody, qkvBody, cellBody, mixedBody].map((body) => body(word, 'cross_attention')).join('');
  },
};

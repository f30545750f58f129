// An encoder's head on the last layer: its dense layer; classes, the begin and end of an answer, or a vector.

import { bar, derived, escaped, number, strip, table } from '../../../mlx_transformer/page/kit.js';
import { softmax } from './pass.js';

export const headOf = (config) => ({ kind: 'vocabulary', pooling: 'first', labels: [], ...config.head });
/** Whether it has one output for the whole text. */
const perText = ({ kind }) => kind === 'pooled' || kind === 'classes';

export const FORMULAS = {
  hidden: 'the last vectors as they are',
  pooled: 'activation(W · h + b)',
  classes: 'logit<sub>class</sub> = h · W<sub>class</sub> + b<sub>class</sub>',
  'token-classes': 'logit<sub>class</sub> = h · W<sub>class</sub> + b<sub>class</sub>, of each token',
  spans: 'start and end: h · W + b of each token, a softmax over the tokens',
};

/** The head's input, its dense layer, and the index of its output. */
function read(v) {
  const head = headOf(v.pass.config);
  const last = v.out.shape.last();
  const [rows] = v.pass.shape(last);
  const first = perText(head) && head.pooling === 'first';
  const i = first ? 0 : v.out.i;
  if (!perText(head) || first) return { head, i: perText(head) ? 0 : i, html: strip(first ? 'h, the last vector of the first token' : 'h, the last vector', v.pass.row(last, i), { point: last, index: i, lit: v.c }) };
  const each = Array.from({ length: rows }, (_, n) => n).filter((n) => v.hasRow(last, n)).map((n) => v.pass.row(last, n));
  if (each.length < rows) return { head, i: 0, html: '<p>h is the mean of the last vectors of all tokens, of which this page has one.</p>' };
  return { head, i: 0, html: strip(`h, the mean of ${rows} last vectors`, each[0].map((_, c) => each.reduce((sum, row) => sum + row[c], 0) / rows), { lit: v.c }) };
}

/** From the last layer to the classifier's input. */
export function dense(v) {
  const { head, i, html } = read(v);
  if (!head.activation || !v.pass.has('head')) return { head, i, html };
  const place = (point) => ({ point, index: i, lit: v.c });
  const before = v.pass.has('head.head_proj') ? strip('one more dense layer, W · h + b', v.pass.row('head.head_proj', i), place('head.head_proj')) : '';
  const name = `${before ? '' : 'one more dense layer, '}${head.activation} of it${head.norm ? ', and a norm' : ''}`;
  return { head, i, html: `${html}${before}${strip(name, v.pass.row('head', i), place('head'))}` };
}

/** Classes with their shares (softmax or sigmoid), or with scores. */
function classes(v, head, i) {
  const row = v.pass.row('logits', i);
  if (head.scores) return table(['the text', 'score'], head.labels.map((label, n) => [escaped(label), number(row[n], 'logits', `${i},${n}`)]), { label: 'scores' });
  const shares = head.several ? Array.from(row, (x) => 1 / (1 + Math.exp(-x))) : softmax(row);
  const order = [...row.keys()].sort((a, b) => row[b] - row[a]);
  const who = head.kind === 'classes' ? 'the text' : `‹${escaped(v.outRead[i])}›`;
  return `<p class="said"><b>${who}: ${escaped(head.labels[order[0]])} ${derived(shares[order[0]], `share ${order[0]}`)}</b>${head.several ? '; each class has a share by itself, 1 / (1 + e<sup>−logit</sup>)' : ''}</p>`
    + table(['class', 'logit', 'share'], order.map((n) => [escaped(head.labels[n]), number(row[n], 'logits', `${i},${n}`), `${derived(shares[n], `share ${n}`)} ${bar(shares[n])}`]), { label: 'classes and their shares' });
}

/** Begin and end of an answer, by token. */
function spans(v) {
  const all = v.outRead.map((_, n) => v.pass.row('logits', n));
  const [start, end] = [0, 1].map((side) => softmax(all.map((row) => row[side])));
  let best = [0, 0];
  start.forEach((_, a) => end.forEach((__, b) => { if (b >= a && start[a] * end[b] > start[best[0]] * end[best[1]]) best = [a, b]; }));
  const rows = v.outRead.map((text, n) => [`<span class="tok">${escaped(text)}</span>`, ...[start, end].flatMap((shares, side) => (
    [number(all[n][side], 'logits', `${n},${side}`), `${derived(shares[n], `${side ? 'end' : 'start'} ${n}`)} ${bar(shares[n])}`]))]);
  return `<p class="said"><b>The likeliest span of this text: ‹${escaped(v.outRead[best[0]])}› to ‹${escaped(v.outRead[best[1]])}›, ${derived(start[best[0]] * end[best[1]], 'span')}</b></p>`
    + table(['token', 'start', 'share', 'end', 'share'], rows, { lit: v.out.i, label: 'begin and end of an answer' });
}

/** A vector and its length, and in the last layer its nearest other words. */
function vector(v, head, i) {
  const row = v.pass.row('logits', i);
  const length = (values) => Math.hypot(...values);
  const out = strip(head.kind === 'pooled' ? 'the vector of the text' : 'the vector of this token', row, { point: 'logits', index: i, lit: v.c })
    + `<p class="said">its length is ${derived(length(row), 'length')}</p>`;
  if (head.kind === 'pooled' || v.outRead.some((_, n) => !v.hasRow('logits', n))) return out;
  const near = v.outRead.map((_, n) => v.pass.row('logits', n)).map((other) => row.reduce((sum, x, c) => sum + x * other[c], 0) / (length(row) * length(other)));
  const order = [...near.keys()].filter((n) => n !== i).sort((a, b) => near[b] - near[a]).slice(0, 8);
  return out + table(['nearest in this text', 'cosine'], order.map((n) => [`<span class="tok">${escaped(v.outRead[n])}</span>`, derived(near[n], `cosine ${n}`)]), { label: 'tokens whose vectors are near' });
}

const POOLED = { cls: 'the first of', last: 'the last of', max: 'the largest of each column of', mean: 'the mean of', mean_sqrt_len: 'the sum, by the root of their number, of', weighted_mean: 'the mean, weighted 1, 2, 3, …, of' };

/** From the last vectors to the text's vector: pooled, dense layers, its length. */
export function ofText(v, { pooling, dense: layers, normalize }) {
  const [d, count] = [v.shape.d, v.pass.shape(v.out.shape.last())[0]];
  const pooled = v.pass.row('text.pooled', 0);
  const parts = pooling.map((way, n) => strip(`${POOLED[way]} the ${count} last vectors`, pooled.subarray(n * d, (n + 1) * d), { point: 'text.pooled', index: 0, from: n * d, lit: v.c - n * d }));
  const deeper = layers.map((activation, n) => strip(`dense layer ${n + 1}, ${activation}`, v.pass.row(`text.dense.${n}`, 0), { point: `text.dense.${n}`, index: 0, lit: v.c }));
  const last = layers.length ? v.pass.row(`text.dense.${layers.length - 1}`, 0) : pooled;
  const length = normalize ? `<p class="said">its length is ${derived(Math.hypot(...last), 'text length')}</p>` : '';
  return `<h3>the vector of the text</h3>${parts.join('')}${deeper.join('')}${length}`
    + strip(normalize ? 'divided by its length: the vector' : 'the vector', v.pass.row('text.vector', 0), { point: 'text.vector', index: 0, lit: v.c });
}

/** The output of a head that predicts no words. */
export function given(v) {
  const { head, i, html } = dense(v);
  if (head.kind === 'spans') return html + spans(v);
  return html + (head.labels.length ? classes(v, head, i) : vector(v, head, i));
}

// The data of the views below the walk, from a pass that the page computed. The form is content.py's, but numbers
// aren't packed.

import { logSumExp } from '../../web/page/sampling.js';
import { Shape } from './pass.js';

const KINDS = {
  encoder: ['Encoder self-attention', 'encoder', 'self_attention', ['source', 'source'], ['source', 'source']],
  decoder: ['Decoder self-attention', 'decoder', 'self_attention', ['target', 'target'], ['target', 'read']],
  cross: ['Cross-attention', 'decoder', 'cross_attention', ['target', 'source'], ['target', 'source']],
};
const LIKELIEST = 5;
const LENS = 3;

/** The data of all views. whole: no part is off; tree: of the beam search, or null. */
export function moreOf(model, pass, tree, whole) {
  const { config, tokens, pieces } = pass;
  const texts = {};
  const named = (ids) => Array.from(ids, (id) => { texts[id] ??= model.text(id); return id; });
  const stack = config.architecture === 'encoder' ? 'encoder' : 'decoder';
  const written = stack === 'encoder' ? tokens.source : tokens.written;
  const sides = { source: tokens.source, target: tokens.target };
  return {
    text: pass.text,
    output: pass.output,
    whole,
    runtimes: ['this page'],
    sides: Object.fromEntries(Object.entries(sides).filter(([, ids]) => ids.length).map(([side, ids]) => [side, { ids: named(ids) }])),
    written: named(written),
    pieces: { source: pieces.source, target: pieces.written, read: pieces.target },
    maps: { bits: 0, kinds: mapsOf(pass) },
    steps: { of: [stepsOf(pass, written, named)] },
    lens: { positions: stack === 'encoder' ? 'source' : 'target', of: [lensOf(model, pass, stack, named)] },
    norms: [normsOf(pass)],
    beam: tree && {
      step: tree.nodes.map(({ step }) => step),
      parent: tree.nodes.map(({ parent }) => parent),
      token: named(tree.nodes.map(({ token }) => token)),
      log_p: tree.nodes.map(({ score }) => four(score)),
      fate: tree.nodes.map(({ fate }) => fate[0]).join(''),
      score: tree.nodes.map(({ final }) => (final === undefined ? null : four(final))),
    },
    texts,
  };
}

const four = (value) => Number(value.toPrecision(4));

function mapsOf(pass) {
  const kinds = {};
  for (const [kind, [name, stack, part, [rows, columns], named]] of Object.entries(KINDS)) {
    const layers = [];
    for (let n = 0; pass.has(`${stack}.layers.${n}.${part}.weights`); n++) layers.push(pass.point(`${stack}.layers.${n}.${part}.weights`));
    if (!layers.length) continue;
    const values = layers.flatMap(({ data }) => [...data]);
    kinds[kind] = { name, rows, columns, named, shape: [layers.length, ...layers[0].shape], values: [values] };
  }
  return kinds;
}

/** Ids and probabilities of the most likely tokens in a row of logits. */
function likeliest(row, count) {
  const total = logSumExp(row);
  const ids = [...row.keys()].sort((a, b) => row[b] - row[a]).slice(0, count);
  return { ids, p: ids.map((id) => four(Math.exp(row[id] - total))) };
}

function stepsOf(pass, written, named) {
  return written.map((id, i) => {
    const row = pass.row('logits', i);
    const { ids, p } = likeliest(row, LIKELIEST);
    const share = four(Math.exp(row[id] - logSumExp(row)));
    return { ids: named(ids), p, written: share, rank: 1 + row.filter((x) => x > row[id]).length, given: i < (pass.given ?? 0) };
  });
}

/** The classifier's tokens after each layer. */
function lensOf(model, pass, stack, named) {
  const shape = new Shape(pass.config, stack);
  const names = [shape.embedding(), ...Array.from({ length: shape.layers }, (_, n) => shape.layer(n))];
  return names.map((name) => {
    const rows = model.twin.read(stack, pass.point(name).data).map((row) => likeliest(row, LENS));
    return { name, ids: rows.map(({ ids }) => named(ids)), p: rows.map(({ p }) => p) };
  });
}

function normsOf(pass) {
  const found = {};
  for (const [name, { data, shape }] of Object.entries(pass.points)) {
    if (!/(embedding|embedding_norm|layers\.\d+|\.norm|attention|feed_forward)$/.test(name)) continue;
    const [rows, width] = shape;
    found[name] = Array.from({ length: rows }, (_, i) => four(Math.hypot(...data.subarray(i * width, (i + 1) * width))));
  }
  return found;
}

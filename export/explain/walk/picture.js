// The whole model on one screen, drawn from the config: each stack's stream of vectors, what every sub-layer reads of it and adds
// to it, their shapes, the memory on its way into cross-attention, and the chosen word's path. A box opens its station.

import { escaped } from '../../../mlx_transformer/page/kit.js';
import { Shape } from './pass.js';

const NAMES = { token: 'token', position: '+ place', self_attention: 'attention', cross_attention: 'cross-attention', feed_forward: 'feed-forward', logits: 'softmax' };
/** The box for each station. */
const BOX = { token: 'token', row: 'token', position: 'position', qkv: 'self_attention', cell: 'self_attention', mixed: 'self_attention', heads: 'self_attention', norm: 'self_attention', 'feed-forward': 'feed_forward', next: 'feed_forward', cross: 'cross_attention', logits: 'logits', search: 'logits' };
const STATION = { token: 'token', position: 'position', self_attention: 'cell', cross_attention: 'cross', feed_forward: 'feed-forward', logits: 'logits' };
const MOST = 3; // stacks of more layers show only the chosen one in full

/** Sizes along the stream and across it. The stream runs to the right on a screen, down on a phone. */
const LYING = { box: 96, depth: 46, step: 102, line: 72, first: 26, stack: 136, begin: 64, into: 24, out: 72, end: 92, upright: false };
const UPRIGHT = { box: 46, depth: 104, step: 54, line: 124, first: 0, stack: 164, begin: 26, into: 12, out: 34, end: 52, upright: true };

/** What stands along one stack's stream: [{kind, layer, shape}]; kind "layers" for those that aren't drawn in full. */
function items(v, stack) {
  const { config, tokens } = v.pass;
  const shape = new Shape(config, stack);
  const n = (stack === 'encoder' ? tokens.source : tokens.target).length;
  const found = [{ kind: 'token', shape: `${n} ids` }, { kind: 'position', shape: `${n} × ${shape.d}` }];
  const shapes = { self_attention: `${shape.heads} × ${n} × ${n}`, cross_attention: `${shape.heads} × ${n} × ${tokens.source.length}`, feed_forward: `${n} × ${shape.inner}` };
  const chosen = Math.min(v.l, shape.layers - 1);
  for (let layer = 0; layer < shape.layers; layer++) {
    if (shape.layers <= MOST || layer === chosen) found.push(...shape.parts().map((kind) => ({ kind, layer, shape: shapes[kind] })));
    else if (found.at(-1).kind === 'layers') found.at(-1).to = layer;
    else found.push({ kind: 'layers', layer, to: layer, shape: `${n} × ${shape.d}` });
  }
  if (stack === v.out.stack) found.push({ kind: 'logits', shape: `${n} × ${v.vocabulary.toLocaleString('en')}` });
  return found;
}

/** A path through points "x y", with a tip at its end. */
function arrow(points) {
  const [[x1, y1], [x2, y2]] = points.slice(-2).map((point) => point.split(' ').map(Number));
  const [dx, dy] = [Math.sign(x2 - x1), Math.sign(y2 - y1)];
  const wing = (side) => `${x2 - 6 * dx + side * 4 * dy} ${y2 - 6 * dy + side * 4 * dx}`;
  return `M${points.join('L')}M${wing(1)}L${x2} ${y2}L${wing(-1)}`;
}

function drawn(v, station, stack, across, size) {
  const at = (along, over) => (size.upright ? `${across + over} ${along}` : `${along} ${across + over}`);
  const path = (...points) => `M${points.map((point) => at(...point)).join('L')}`;
  const tipped = (...points) => arrow(points.map((point) => at(...point)));
  const all = items(v, stack);
  const lit = stack === v.stack;
  const kindNow = BOX[station];
  const [lines, arrows, rings, boxes, texts, layers] = [[], [], [], [], [], new Map()];
  const places = all.map((_, n) => size.begin + n * size.step);
  all.forEach(({ kind, layer, to, shape }, n) => {
    const along = places[n];
    const [into, out] = [along + size.into, along + size.out];
    const reads = kind !== 'token' && kind !== 'position';
    if (kind !== 'layers') {
      if (reads) arrows.push(tipped([into, size.line], [into, size.depth + 1]));
      if (kind !== 'logits') arrows.push(tipped([out, size.depth], [out, size.line - (kind === 'token' ? 1 : 8)]));
      if (reads && kind !== 'logits' || kind === 'position') rings.push(at(out, size.line).split(' '));
    }
    const own = kind === kindNow && (kind === 'logits' || kind === 'cross_attention' ? (kind === 'logits' || layer === v.l) : lit && (layer === undefined || layer === v.l));
    const name = kind === 'layers' ? `layer${to > layer ? 's' : ''} ${layer + 1}${to > layer ? ` to ${to + 1}` : ''}` : NAMES[kind];
    const where = layer === undefined ? stack : `${stack}, layer ${layer + 1}`;
    const go = STATION[kind] ? ` data-go="${STATION[kind]}"` : '';
    const near = kind === 'layers' && layer < v.l ? to : layer; // the nearest of those that aren't drawn
    const [left, top] = at(along, 0).split(' ');
    boxes.push(`<button type="button" class="box${own ? ' lit' : ''}"${own ? ' aria-current="step"' : ''}${go} data-stack="${stack}"${layer === undefined ? '' : ` data-layer="${near}"`}`
      + ` aria-label="${name} ${shape}, ${where}" style="left:${left}px;top:${top}px">${name} <small>${shape}</small></button>`);
    if (layer !== undefined && kind !== 'layers') layers.set(layer, [layers.get(layer)?.[0] ?? along, along + size.box]);
  });
  const end = places.at(-1) + (all.at(-1).kind === 'logits' ? size.into : size.box + 8);
  lines.push(`<path class="stream${lit ? ' lit' : ''}" d="${path([places[0] + size.out, size.line], [end, size.line])}"/>`);
  for (const [from, to] of layers.values()) {
    const [x, y] = at(from - 3, size.upright ? -3 : -20).split(' ').map(Number);
    const [long, deep] = [to - from + 6, size.line + (size.upright ? 13 : 30)];
    lines.push(`<rect class="layer" x="${x}" y="${y}" width="${size.upright ? deep : long}" height="${size.upright ? long : deep}" rx="8"/>`);
  }
  if (!size.upright) for (const [layer, [from]] of layers) texts.push(`<text x="${from + 4}" y="${across - 7}">layer ${layer + 1}</text>`);
  const label = size.upright ? [across, 14] : [0, across + size.line + 4];
  texts.push(`<text class="stack" x="${label[0]}" y="${label[1]}">${stack}</text>`);
  const reads = size.upright ? '' : `<text class="tok" x="0" y="${across + 28}">${escaped(v.read[v.i] ?? '').slice(0, 9)}</text>`;
  if (lit) texts.push(reads);
  if (stack === v.out.stack && !size.upright) texts.push(`<text class="tok" x="${places.at(-1) + size.box + 8}" y="${across + 28}">→ ${escaped(v.outLabels[v.out.i].slice(0, 9))}</text>`);
  const word = lines.join('') + arrows.map((d) => `<path class="arrow" d="${d}"/>`).join('') + rings.map(([x, y]) => `<g class="ring"><circle cx="${x}" cy="${y}" r="7"/><path d="M${x - 4} ${y}h8M${x} ${y - 4}v8"/></g>`).join('') + texts.join('');
  const cross = all.map(({ kind, layer }, n) => [kind, layer, places[n]]).filter(([kind]) => kind === 'cross_attention');
  return { word, boxes: boxes.join(''), end, at, cross, long: places.at(-1) + size.box + (stack === v.out.stack ? size.end : 8) };
}

/** The picture as HTML. upright: on a narrow screen. */
export function picture(v, station, upright) {
  const size = upright ? UPRIGHT : LYING;
  const { config } = v.pass;
  const stacks = ['encoder', 'decoder'].filter((stack) => config[`${stack}_layers`] && (config.architecture === 'encoder-decoder' || config.architecture === stack));
  const each = stacks.map((stack, n) => drawn(v, station, stack, size.first + n * size.stack, size));
  const memory = [];
  if (each.length === 2) { // from the end of the encoder beside the decoder, into each of its cross-attentions
    const [from, to] = each;
    const gutter = size.stack - (upright ? 14 : 24);
    for (const [, layer, along] of to.cross) {
      const middle = along + size.box / 2;
      const d = arrow([from.at(from.end, size.line), from.at(from.end, gutter), from.at(middle, gutter), from.at(middle, size.stack - 1)]);
      memory.push(`<path class="memory${v.stack === 'encoder' && layer === v.l ? ' lit' : ''}" d="${d}"/>`);
    }
    if (!upright) memory.push(`<text x="${from.end + 6}" y="${size.first + size.line - 4}">memory, ${v.source.length} × ${v.shape.d}</text>`);
  }
  const [long, deep] = [Math.max(...each.map((one) => one.long)), size.first + (each.length - 1) * size.stack + size.line + (upright ? 14 : 14)];
  const [width, height] = upright ? [deep, long] : [long, deep];
  return `<div class="picture${upright ? ' upright' : ''}" style="width:${width}px;height:${height}px"><svg width="${width}" height="${height}" aria-hidden="true">`
    + `${memory.join('')}${each.map(({ word }) => word).join('')}</svg>${each.map(({ boxes }) => boxes).join('')}</div>`;
}

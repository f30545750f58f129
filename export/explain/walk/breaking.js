// Break it: switch parts off and see the effect. All numbers are computed here.

import { derived, escaped, table } from '../../../mlx_transformer/page/kit.js';
import { bits } from './pass.js';
import { rest } from './resting.js';

const KINDS = { self_attention: 'self-attention', cross_attention: 'cross-attention', feed_forward: 'feed-forward' };

/** All parts that can be switched off one by one: [[stack, layer, kind, head]]; head is undefined for a sub-layer. */
export function partsOf(config) {
  const found = [];
  for (const stack of ['encoder', 'decoder']) {
    const kinds = ['self_attention', ...(stack === 'decoder' && config.architecture === 'encoder-decoder' ? ['cross_attention'] : [])];
    for (let layer = 0; layer < (config[`${stack}_layers`] ?? 0); layer++) {
      for (const kind of kinds) {
        for (let head = 0; head < config.heads; head++) found.push([stack, layer, kind, head]);
      }
      for (const kind of [...kinds, 'feed_forward']) found.push([stack, layer, kind]);
    }
  }
  return config.architecture === 'encoder' ? found.filter(([stack]) => stack === 'encoder')
    : config.architecture === 'decoder' ? found.filter(([stack]) => stack === 'decoder') : found;
}

export const partName = ([stack, layer, kind, head]) => `${stack}, layer ${layer + 1}, ${KINDS[kind]}${head === undefined ? ', all of it' : `, head ${head + 1}`}`;

/** Switches for the engine. off: {positions: true, ..., parts: [[...]]}. */
export const switchesOf = ({ parts = [], ...whole }) => ({
  ...whole, heads: parts.filter((part) => part.length === 4), sublayers: parts.filter((part) => part.length === 3),
});

/** The switches, beside the output: parts of the whole model, and one part of one layer. */
export function breaker(v) {
  const boxes = switchable(v).map(([name, [shown]]) => `<label class="switch"><input type="checkbox" data-off="${name}"${v.off[name] ? ' checked' : ''}> ${shown} off</label>`);
  const chosen = v.off.parts?.[0]?.join(',');
  const options = partsOf(v.pass.config).map((part) => `<option value="${part.join(',')}"${part.join(',') === chosen ? ' selected' : ''}>${partName(part)}</option>`);
  return `<b id="break-it">Break it:</b>${boxes.join('')}<label class="switch">one part off <select id="part"><option value="">none</option>${options.join('')}</select></label>`
    + '<button type="button" id="all-on">all on again</button>';
}

const switchable = (v) => Object.entries(v.said.switches).filter(([name]) => name !== 'mask' || v.pass.config.architecture !== 'encoder');

/** Mean entropy in bits of the rows, for each kind of attention. */
function spreads(pass) {
  const found = {};
  for (const [name, { data, shape }] of Object.entries(pass.points)) {
    if (!name.endsWith('.weights')) continue;
    const kind = name.includes('cross') ? 'cross-attention' : name.startsWith('encoder') ? 'encoder' : 'decoder';
    const width = shape.at(-1);
    for (let at = 0; at < data.length; at += width) (found[kind] ??= []).push(bits(data.subarray(at, at + width)));
  }
  return Object.entries(found).map(([kind, all]) => [kind, all.reduce((a, b) => a + b, 0) / all.length]);
}

const apart = (a, b) => a.reduce((most, x, n) => Math.max(most, Math.abs(x - b[n])), 0);

/** How far a word's memory moves when the other words change places: the source is reversed, except its end. */
function moved(model, pass, switches) {
  const { source, written } = pass.tokens;
  const turned = [...source.slice(0, -1).reverse(), source.at(-1)];
  const name = model.config.norm_placement === 'post' ? `encoder.layers.${model.config.encoder_layers - 1}` : 'encoder.norm';
  const [a, b] = [source, turned].map((ids) => model.pass({ source: ids, written }, switches, {}));
  return apart(a.row(name, 0), b.row(name, source.length - 2));
}

/** How far earlier logits move when the last word changes. */
function looksAhead(model, pass, switches) {
  const { source, written } = pass.tokens;
  if (written.length < 3) return null;
  const other = [...written.slice(0, -2), written[0], written.at(-1)];
  const [a, b] = [written, other].map((ids) => model.pass({ source, written: ids }, switches, {}));
  const V = a.shape('logits').at(-1);
  const end = (written.length - 2) * V; // rows before the changed word
  return apart(a.points.logits.data.subarray(0, end), b.points.logits.data.subarray(0, end));
}

const seenNumber = (value, name) => derived(value, name, 2); // two digits: the effects are larger

/** Table of effects: the output, log p of the right output, entropy of heads, movements, each with and without the
 * switches. surer: text if another output gets a higher log p. */
export async function seen(model, whole, off, surer, stopped = () => false) {
  const switches = switchesOf(off);
  const encoderAlone = model.config.architecture === 'encoder';
  const rows = [];
  let note = '';
  const both = (said, key, before, after) => rows.push([said, seenNumber(before, key), seenNumber(after, `${key}-off`)]);
  if (!encoderAlone) {
    const now = await model.written(whole.text, switches, stopped);
    rows.push(['writes', `‹${escaped(whole.output)}›`, `‹${escaped(now.output)}›`]);
    both('log p of that', 'log-p', whole.logP, now.logP);
    if (now.output !== whole.output && now.logP > whole.logP) note = `<p class="said">${surer}</p>`;
  }
  await rest();
  both(encoderAlone ? 'log p of the first guess' : 'log p of the right output, read at once', 'right', model.logP(whole, {}), model.logP(whole, switches));
  await rest();
  const after = spreads(model.pass(whole.tokens, switches, {}));
  spreads(whole).forEach(([kind, value], n) => both(`spread of ${kind} heads, bits`, `bits-${kind}`, value, after[n][1]));
  if (model.twin.hasEncoder && whole.tokens.source.length > 2) {
    await rest();
    both('a word moves with its place by', 'moved', moved(model, whole, {}), moved(model, whole, switches));
  }
  await rest();
  const ahead = encoderAlone ? null : looksAhead(model, whole, {});
  if (ahead !== null) both('earlier logits move with a later word by', 'ahead', ahead, looksAhead(model, whole, switches));
  return table(['', 'whole', 'with this off'], rows, { label: 'what is seen' }) + note;
}

/** Switch each part off on its own: the fall of the right output's log p, worst first. */
export function eachInTurn(model, whole) {
  const right = model.logP(whole, {});
  const found = partsOf(model.config).map((part) => [part, model.logP(whole, switchesOf({ parts: [part] })) - right]);
  found.sort((a, b) => a[1] - b[1]);
  return table(['part that is off', 'log p of the right output changes by'], found.map(([part, change]) => [partName(part), seenNumber(change, part.join(','))]), { label: 'each part off in turn' });
}

export const breaking = {
  id: 'break',
  formula: () => 'the same weights, a part left out',
  controls: () => '<button type="button" id="try-all">each part off in turn</button>',
  body: (v) => `<ul>${switchable(v).map(([, [shown, said]]) => `<li><b>${shown} off</b>: ${said}</li>`).join('')}</ul><div id="seen">${v.seen ?? ''}</div><div id="turns">${v.turns ?? ''}</div>`,
};

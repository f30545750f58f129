// The stack at the top, drawn from the config: every sub-layer of every layer, with the current one lit.

import { escaped } from '../../../mlx_transformer/page/kit.js';

const NAMES = { self_attention: 'attention', cross_attention: 'cross', feed_forward: 'feed-forward' };
/** The box for each station. */
const BOX = { token: 'token', row: 'token', position: 'position', qkv: 'self_attention', cell: 'self_attention', mixed: 'self_attention', heads: 'self_attention', norm: 'self_attention', 'feed-forward': 'feed_forward', next: 'next', cross: 'cross_attention', logits: 'logits', search: 'logits' };
const STATION = { token: 'token', position: 'position', self_attention: 'cell', cross_attention: 'cross', feed_forward: 'feed-forward', logits: 'logits' };
const MOST = 3; // stacks of more layers show only the chosen one in full

export function lanes(v, station) {
  const { config } = v.pass;
  const box = BOX[station];
  const button = (stack, kind, layer, text) => {
    const cross = kind === 'cross_attention' || kind === 'logits';
    const lit = box === kind && (cross ? (kind === 'logits' || layer === v.l) : stack === v.stack && (layer === undefined || layer === v.l));
    return `<button type="button" class="box${lit ? ' lit' : ''}"${lit ? ' aria-current="step"' : ''} data-go="${STATION[kind]}" data-stack="${stack}"${layer === undefined ? '' : ` data-layer="${layer}"`}>${text}</button>`;
  };
  const lane = (stack) => {
    const kinds = ['self_attention', ...(stack === 'decoder' && config.architecture === 'encoder-decoder' ? ['cross_attention'] : []), 'feed_forward'];
    const count = config[`${stack}_layers`];
    const layers = Array.from({ length: count }, (_, n) => {
      if (count > MOST && n !== v.l) return `<button type="button" class="box" data-stack="${stack}" data-layer="${n}" aria-label="${stack}, layer ${n + 1}">${n + 1}</button>`;
      return `<span class="layer" role="group" aria-label="layer ${n + 1}"><small aria-hidden="true">${n + 1}</small>${kinds.map((kind) => button(stack, kind, n, NAMES[kind])).join('')}</span>`;
    });
    const writes = stack === v.out.stack;
    return `<div class="lane"><b>${stack}</b>${button(stack, 'token', undefined, 'token')}${button(stack, 'position', undefined, '+ place')}${layers.join('')}`
      + `${writes ? `${button(stack, 'logits', undefined, 'softmax')}<span class="tok">${escaped(v.outLabels[v.out.i])}</span>` : '<span class="memory">→ memory</span>'}</div>`;
  };
  return ['encoder', 'decoder'].filter((stack) => config[`${stack}_layers`] && (config.architecture === 'encoder-decoder' || config.architecture === stack)).map(lane).join('');
}

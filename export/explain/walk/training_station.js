// Training, from numbers that were measured once: the loss of each step, and a head before and after.

import { derived, escaped, map, short } from '../../../mlx_transformer/page/kit.js';
import { mostOf } from './pass.js';

const [WIDTH, HEIGHT] = [640, 120];

function curve(losses) {
  const most = Math.max(...losses);
  const points = losses.map((loss, n) => `${((n * WIDTH) / (losses.length - 1)).toFixed(1)} ${(HEIGHT - (loss * (HEIGHT - 4)) / most).toFixed(1)}`);
  const [first, last] = [losses[0], losses.at(-1)];
  return `<figure><svg viewBox="0 0 ${WIDTH} ${HEIGHT}" role="img" aria-label="the loss of ${losses.length} steps, falling">`
    + `<line x1="0" x2="${WIDTH}" y1="${HEIGHT}" y2="${HEIGHT}" class="axis"/><path d="M${points.join('L')}"/></svg>`
    + `<figcaption>loss by step: ${derived(first, 'first')} at the first, ${derived(last, 'last')} after ${losses.length}; who guesses among nine words has ${derived(Math.log(9), 'guess')}</figcaption></figure>`;
}

export const training = {
  id: 'training',
  formula: () => 'loss = −log p(right word); w ← w − rate · ∂loss/∂w',
  body(v) {
    const { losses, words, layer, head, ...maps } = v.training;
    const names = words.map((id) => `word ${id}`);
    const drawn = ['before', 'after'].map((when) => {
      const [first] = maps[when];
      const [said, most] = [`while writing ‹${names[0]}› looks most at ‹${names[mostOf(first)]}›, `, Math.max(...first)];
      return `<div class="head"><b>${when}</b>${map(`${when} training`, [...names, 'end'], names, (r, c) => maps[when][r][c], { index: '', lit: 0, said: `${said}${short(most)}` })}<small>${escaped(said)}${derived(most, when)}</small></div>`;
    });
    return `${curve(losses)}<p class="said">One head of cross-attention (layer ${layer + 1}, head ${head + 1}) before the first step and after the last:</p><div class="heads">${drawn.join('')}</div>`;
  },
};

// Texts of words.toml, with terms as buttons, and the glossary.

import { escaped } from '../../../mlx_transformer/page/kit.js';

/** A text with its terms as buttons: [[term]] or [[term|as shown]]. */
export const words = (text) => text.replace(/\[\[([^\]|]+)(?:\|([^\]]+))?\]\]/g, (_, term, shown) => (
  `<button type="button" class="gl" data-gl="${escaped(term.toLowerCase())}" aria-haspopup="dialog">${escaped(shown ?? term)}</button>`));

/** The kinds that a model's options make, for texts that differ from the usual. */
export function kindsOf({ positions, activation = 'relu', norm, scale_embeddings: scaled, attention_scale: scale, ...config }) {
  const own = { ...config, ...config.decoder };
  const layers = [config, ...(config.layer_pattern ?? [])];
  return [positions, activation === 'relu' ? '' : 'smooth', own.gated ? 'gated' : '', norm === 'rmsnorm' ? 'rms' : '', scaled === false ? 'unscaled' : '',
    scale ? 'unscaled-scores' : '', (own.key_value_heads ?? own.heads) < own.heads ? 'grouped' : '', layers.some(({ window }) => window) ? 'windows' : '',
    layers.some(({ query_key_norm: normed }) => normed) ? 'normed-queries' : ''];
}

/** A file of the repository: a link if the page knows its address. links: {path: address}. */
const linked = (links, path, text = path, place = '') => (links[path] ? `<a href="${links[path]}${place}">${text}</a>` : text);

/** A glossary entry: [two sentences, formula, page of the guide]. */
export const entry = (term, [said, formula, page], links) => (
  `<b>${escaped(term)}</b> ${escaped(said)}${formula ? ` <code>${escaped(formula)}</code>` : ''} <small>guide: ${linked(links, `docs/guide/${page}.md`, page)}</small>`);

/** Where to read more about a station: the guide, the claims, the code. */
export const footer = ({ guide, claim, code }, links) => (
  `guide: ${linked(links, `docs/guide/${guide}.md`)} · claim: ${linked(links, 'docs/claims/README.md', `row ${claim}`, `#row-${claim}`)} · code: ${linked(links, code)}`);

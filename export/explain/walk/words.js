// Texts of words.toml, whose terms are buttons, and what the glossary says of one.

import { escaped } from '../../../mlx_transformer/page/kit.js';

/** A text with its terms as buttons: [[term]] or [[term|as shown]]. */
export const words = (text) => text.replace(/\[\[([^\]|]+)(?:\|([^\]]+))?\]\]/g, (_, term, shown) => (
  `<button type="button" class="gl" data-gl="${escaped(term.toLowerCase())}" aria-haspopup="dialog">${escaped(shown ?? term)}</button>`));

/** What the glossary says of a term: [two sentences, formula, page of the guide]. */
export const entry = (term, [said, formula, page]) => (
  `<b>${escaped(term)}</b> ${escaped(said)}${formula ? ` <code>${escaped(formula)}</code>` : ''} <small>guide: ${escaped(page)}</small>`);

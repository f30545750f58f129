// Tokens that a model's maker added: one id each, wherever they stand in a text. As mlx_transformer/text/added_tokens.py.

const escaped = (text) => text.replace(/[\\^$.*+?()[\]{}|/-]/g, '\\$&');

/** The tokens of a parsed tokenizer.json that are found in text. */
export function addedTokens({ added_tokens: added, post_processor: template }) {
  const { whole = [], prefixes } = template.mlx_transformer ?? {};
  return added.filter(({ id, special }) => !special && (!prefixes || whole.includes(id)));
}

export class Added {
  /** spelled: how a token is spelled in the text that it is looked for in. */
  constructor(tokens, spelled = (text) => text) {
    this.tokens = new Map(tokens.map((token) => [spelled(token.content), token]).filter(([text]) => text).reverse());
    const texts = [...this.tokens.keys()].sort((a, b) => b.length - a.length);
    this.pattern = texts.length ? new RegExp(texts.map(escaped).join('|'), 'gu') : null;
  }

  /** A text taken apart: [{id, text, first, last}], id undefined of what stands between tokens; first, last: whether
   * the text begins or ends there. */
  parts(text) {
    const found = [];
    let begun = 0;
    const push = (id, start, end) => {
      if (id !== undefined || start < end) found.push({ id, text: text.slice(start, end), first: !start, last: end === text.length });
    };
    for (const match of this.pattern ? text.matchAll(this.pattern) : []) {
      const token = this.tokens.get(match[0]);
      let [start, end] = [match.index, match.index + match[0].length];
      const within = /[\p{L}\p{M}\p{N}\p{Pc}]$/u.test(text.slice(0, start)) || /^[\p{L}\p{M}\p{N}\p{Pc}]/u.test(text.slice(end));
      if (token.single_word && within) continue;
      if (token.lstrip) start = Math.max(begun, text.slice(0, start).trimEnd().length);
      if (token.rstrip) end = text.length - text.slice(end).trimStart().length;
      push(undefined, begun, start);
      push(token.id, start, end);
      begun = end;
    }
    push(undefined, begun, text.length);
    return found;
  }
}

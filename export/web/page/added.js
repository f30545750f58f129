// Tokens that a model's maker added: one id each, wherever they stand in a text. As mlx_transformer/text/added_tokens.py.

const escaped = (text) => text.replace(/[\\^$.*+?()[\]{}|/-]/g, '\\$&');

/** The tokens of a parsed tokenizer.json that are found in text. */
export function addedTokens({ added_tokens: added, post_processor: template }) {
  const { whole = [], prefixes } = template.mlx_transformer ?? {};
  return added.filter(({ id, special }) => !special && (!prefixes || whole.includes(id)));
}

// What a word consists of, and white space, as `tokenizers` has them: Rust's \w and \s.
const WORD = String.raw`[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}]`;
const WHITE = String.raw`\p{White_Space}`;
const [WORD_BEFORE, WORD_BEHIND] = [new RegExp(`${WORD}$`, 'u'), new RegExp(`^${WORD}`, 'u')];

/** The length of a text without, and that of, the characters of a class at its end or its beginning. */
const beforeEnd = (text, white) => text.search(new RegExp(`(?<![${white}])[${white}]*$`, 'u'));
const atBeginning = (text, white) => text.match(new RegExp(`^[${white}]*`, 'u'))[0].length;

export class Added {
  /** spelled: how a token is spelled in the text that it is looked for in. */
  constructor(tokens, spelled = (text) => text) {
    this.tokens = new Map(tokens.map((token) => [spelled(token.content), token]).filter(([text]) => text).reverse());
    const texts = [...this.tokens.keys()].sort((a, b) => b.length - a.length);
    this.pattern = texts.length ? new RegExp(texts.map(escaped).join('|'), 'gu') : null;
  }

  /** A text taken apart: [{id, text, first}], id undefined of what stands between tokens; first: whether the text
   * begins there. */
  parts(text) {
    const found = [];
    let begun = 0;
    const push = (id, start, end) => {
      if (id !== undefined || start < end) found.push({ id, text: text.slice(start, end), first: !start });
    };
    for (const match of this.pattern ? text.matchAll(this.pattern) : []) {
      const token = this.tokens.get(match[0]);
      let [start, end] = [match.index, match.index + match[0].length];
      const within = () => WORD_BEFORE.test(text.slice(0, start)) || WORD_BEHIND.test(text.slice(end));
      if (token.single_word && within()) continue;
      if (token.lstrip) start = Math.max(begun, beforeEnd(text.slice(0, start), WHITE));
      if (token.rstrip) end += atBeginning(text.slice(end), WHITE);
      push(undefined, begun, start);
      push(token.id, start, end);
      begun = end;
    }
    push(undefined, begun, text.length);
    return found;
  }
}

/** Tokens as the tokenizers of transformers that are written in Python find them (PythonSplitter). */
export class AddedInPython extends Added {
  parts(text) {
    const white = String.raw`${WHITE}\x1c-\x1f`;
    const texts = this.pattern ? text.split(new RegExp(`(${this.pattern.source})`, 'u')).filter(Boolean) : [text];
    const firsts = texts.map((_, i) => !i);
    texts.forEach((part, i) => {
      const token = this.tokens.get(part);
      if (!token) return;
      const [left, right] = [texts[i - 1], texts[i + 1]];
      if (token.rstrip && right) texts[i + 1] = right.slice(atBeginning(right, white));
      if (token.lstrip && left) texts[i - 1] = left.slice(0, beforeEnd(left, white));
      if (token.single_word && left && !left.endsWith(' ')) [texts[i - 1], texts[i]] = [texts[i - 1] + part, ''];
      else if (token.single_word && right && !right.startsWith(' ')) [texts[i + 1], texts[i]] = [part + texts[i + 1], ''];
    });
    return texts.map((part, i) => ({ id: this.tokens.get(part)?.id, text: part, first: firsts[i] })).filter((part) => part.text);
  }
}

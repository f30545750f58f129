// Text to ids and back by a tokenizer.json of this project, trained or imported, as in the Python package; or by two of
// them, {source, target}, one per language.

import { Added, AddedInPython, addedTokens } from './added.js';
import { ByteLevel } from './bytes.js';
import { markOf, Pieces } from './pieces.js';

/** The tokenizer of the specification's kind, and the ids before and after a text. */
class Side {
  constructor(specification) {
    const { post_processor: template, added_tokens: added } = specification;
    const { silent = [], strips: inPython } = template.mlx_transformer ?? {};
    this.special = new Set([...added.filter((each) => each.special).map(({ id }) => id), ...silent]);
    this.kind = new (markOf(specification) ? Pieces : ByteLevel)(specification, this.special);
    const parts = template.single.map(({ SpecialToken: token }) => token && template.special_tokens[token.id].ids);
    const text = parts.indexOf(undefined);
    [this.first, this.last] = [parts.slice(0, text).flat(), parts.slice(text + 1).flat()];
    const tokens = addedTokens(specification);
    this.typed = inPython ? new AddedInPython(tokens) : new Added(tokens.filter(({ normalized }) => !normalized));
    this.normal = new Added(inPython ? [] : tokens.filter(({ normalized }) => normalized), (each) => this.kind.normalized(each));
  }

  /** Ids of a text, without what stands around it. */
  cut(text) {
    return this.typed.parts(text).flatMap((part) => part.id ?? this.#between(part));
  }

  #between({ text, first: isFirst }) {
    const [prefix, rest] = this.kind.withoutPrefix(text);
    const parts = this.normal.parts(this.kind.normalized(rest));
    return [...prefix, ...parts.flatMap(({ id, text: part, first }) => id ?? this.kind.cut(part, first && isFirst))];
  }
}

export class Tokenizer {
  #source;
  #target;

  /** specification: a parsed tokenizer.json, or two. */
  constructor(specification) {
    this.#target = new Side(specification.target ?? specification);
    this.#source = specification.source ? new Side(specification.source) : this.#target;
  }

  /** Ids of a text, with the end token. Special tokens in the text are plain text: "</s>" is four characters. */
  encode(text) {
    const { first, last } = this.#source;
    return [...first, ...this.#source.cut(text.toWellFormed()), ...last];
  }

  /** The text of ids without special ones; invalid UTF-8 becomes U+FFFD. */
  decode(ids) {
    return this.#target.kind.text(ids);
  }

  /** The words of a source, as in `words`. */
  sourceWords(ids) {
    return wordsOf(ids, this.#source);
  }

  /** The words of an output: [{text, at}], `at` being the index of the word's first token. */
  words(ids) {
    return wordsOf(ids, this.#target);
  }
}

/** An output is read again with each token that is added: what was read of its beginning is kept, side.read. */
function wordsOf(ids, side) {
  const { kind, special, read } = side;
  const goesOn = read && read.ids.length <= ids.length && read.ids.every((id, i) => id === ids[i]);
  const words = goesOn ? read.words.map((word) => ({ ...word })) : [];
  let [before, begun] = goesOn ? [read.before, read.begun] : ['', -1];
  for (let i = goesOn ? read.ids.length : 0; i < ids.length; i++) {
    const text = kind.settled(ids.slice(0, i + 1));
    if (text.length === before.length) {
      if (begun < 0 && !special.has(ids[i])) begun = i; // part of a character, which may begin a word
      continue;
    }
    const starts = [...text.matchAll(kind.word)].some(({ index }) => index === before.length);
    if (starts || !words.length) words.push({ text: '', at: begun < 0 ? i : begun });
    words.at(-1).text += text.slice(before.length);
    [before, begun] = [text, -1];
  }
  side.read = { ids: [...ids], words: words.map((word) => ({ ...word })), before, begun };
  const rest = kind.text(ids).slice(before.length);
  if (rest && begun < 0 && words.length) words.at(-1).text += rest; // part of the last token, which began earlier
  else if (rest) words.push({ text: rest, at: Math.max(begun, 0) });
  return words;
}

// Cuts text with the tokenizer of the page, and writes text from ids, in Node.
//
//     node with_tokenizer.mjs PAGE TASK.json ANSWER.json
//
// Task: {tokenizer (the text of its file), texts, rows (of ids), quick (no words)}. Answer: {ids, texts, words, added}.

import { readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

const [page, task, answer] = process.argv.slice(2);
const { Tokenizer } = await import(pathToFileURL(join(page, 'tokenizer.js')).href);
const { tokenizer: specification, texts, rows, quick } = JSON.parse(readFileSync(task));
const tokenizer = new Tokenizer(JSON.parse(specification));
const found = {
  ids: texts.map((text) => tokenizer.encode(text)),
  texts: rows.map((ids) => tokenizer.decode(ids)),
  words: quick ? [] : rows.map((ids) => tokenizer.words(ids)),
  // while an output is written its words are asked for again with each token
  added: quick ? [] : rows.map((ids) => ids.map((_, n) => tokenizer.words(ids.slice(0, n + 1))).at(-1)),
};
writeFileSync(answer, JSON.stringify(found));

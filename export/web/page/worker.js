// Runs models in a worker, which answers the page's requests (KINDS).

import { byWords } from './attention.js';
import { beamSearch } from './beam.js';
import { fetched } from './files.js';
import { alternatives, tokens } from './greedy.js';
import { memoryInUse, openModel, watchMemory } from './models.js';
import { answerBy, graphics } from './requests.js';
import { Shortlist } from './shortlist.js';
import { Tokenizer } from './tokenizer.js';

watchMemory();

const FIRST = { method: 'greedy', lengthPenalty: 0.6 }; // a first run, so nobody waits for the setup
let [site, tokenizer, opened, shortlist] = [null, null, null, null];

const KINDS = {
  async begin({ base }) {
    const read = async (path) => (await fetch(new URL(path, base))).json();
    site = { ...(await read('site.json')), base };
    tokenizer = new Tokenizer(await read(`tokenizer.json?${site.files['tokenizer.json'].sha256.slice(0, 16)}`));
    return { isolated: globalThis.crossOriginIsolated, ...await graphics() };
  },

  /** Open the site's model number `model`, in place of the previous one. */
  async open({ model, device, threads, say }) {
    const began = performance.now();
    for (const session of opened?.sessions ?? []) await session.release();
    opened = null;
    opened = await openModel(site, site.models[model], device, threads, (share) => say({ share }));
    if (site.shortlist && !shortlist) shortlist = new Shortlist(await fetched(site, site.shortlist.file), site.shortlist.shared);
    const [any] = Object.keys(site.config.generation.languages ?? {});
    await translated({ text: '.', options: { ...FIRST, languages: { source: any, target: any } }, say() {}, stopped: () => false });
    return { seconds: (performance.now() - began) / 1000, threads: opened.threads, memory: memoryInUse() };
  },

  translate: translated,

  /** The most likely tokens at place `at` of an output. */
  async alternatives({ text, prefix, count, ...options }) {
    const { source, forced } = read(text, options, prefix);
    const found = await alternatives(opened.model, source, prefix, forced, count);
    return found.map(({ id, probability }) => ({ id, probability, text: tokenizer.decode([id]) }));
  },

  /** Attention by word for the last translation: {source, output, shares}. shares has a row for each output word,
   * with a share for each source word; the last share is the source's end. */
  async attention({ text, languages, ids }) {
    const { source, tail } = read(text, { languages });
    const [from, to] = [tokenizer.sourceWords(source.slice(0, -tail)), tokenizer.words(ids)];
    const shares = byWords(await opened.model.attention(source, ids), from, to, tail);
    return { source: from.map((word) => word.text.trim()), output: to.map((word) => word.text.trim()), shares };
  },

  encode: ({ texts }) => texts.map((text) => tokenizer.encode(text)),
  decode: ({ rows }) => rows.map((ids) => tokenizer.decode(ids)),
};

/** Tokenise a text, with its language ids. Returns the source ids, how many of them are its end, and the output's
 * forced first ids; tells the model its start token and candidates. languages: codes {source, target} in a
 * multilingual model. listed: whether to use the shortlist. prefix: first tokens chosen by the user. */
function read(text, { languages = {}, listed = true }, prefix = []) {
  const { config } = site;
  const { languages: known = {}, forced_first: usual, target_in_source: inSource, task_prefix: task, end_ids: ends } = config.generation;
  const { source_last: last, target_starts: starts } = config.generation;
  const [from, to] = [languages.source, languages.target].map((code) => (code in known ? [known[code]] : []));
  const ids = tokenizer.encode(task + text);
  const typed = inSource && Object.values(known).includes(ids[0]); // >>deu<< Hello
  const around = typed ? [] : inSource ? to : from;
  const begun = to.length || usual.length;
  if (!typed && Object.keys(known).length && !(around.length && begun)) throw new Error('choose the language of the text and that of the translation');
  const source = last ? [...ids, ...around] : [...around, ...ids];
  const forced = to.length && !inSource && !starts ? to : usual;
  const start = (starts ? to[0] : undefined) ?? config.start_id;
  const needed = [config.pad_id, config.bos_id, start, config.eos_id, ...ends, ...forced, ...prefix];
  const candidates = shortlist && listed ? [...shortlist.candidates(source, config.vocab_size), ...needed] : null;
  Object.assign(opened.model, { config: { ...config, start_id: start }, candidates });
  return { source, tail: last ? 1 + around.length : 1, forced };
}

/** {ids, words, tokensPerSecond, ...}; parts sent on the way have the same form. */
async function translated({ text, options, say, stopped: given }) {
  const began = performance.now();
  const { source, forced } = read(text, options, options.prefix);
  let first = null;
  const shown = (ids) => {
    first ??= performance.now() - began;
    return { ids, words: tokenizer.words(ids) };
  };
  const heard = (ids) => say(shown(ids));
  const { found, count } = await searched(source, { ...options, forced, stopped: given, heard });
  const seconds = (performance.now() - began) / 1000;
  const answer = found.length ? shown(found[0].ids) : { ids: [], words: [] };
  const others = found.slice(1).map(({ ids, score }) => ({ text: tokenizer.decode(ids), ids, score }));
  return {
    ...answer, others, score: found[0]?.score, seconds, firstSeconds: first / 1000, tokensPerSecond: count / seconds,
    memory: memoryInUse(), stopped: given(),
  };
}

/** The outputs, best first, and the best one's number of tokens, with its end. */
async function searched(source, options) {
  const { model } = opened;
  if (model.search) {
    const found = await model.search(source, options);
    return { found, count: (found[0]?.ids.length ?? 0) + 1 };
  }
  if (options.method === 'beam') {
    const found = await beamSearch(model, source, options);
    return { found, count: (found[0]?.ids.length ?? 0) + 1 };
  }
  const [ids, ends] = [[], [site.config.eos_id, ...site.config.generation.end_ids]];
  let count = 0;
  for await (const { id } of tokens(model, source, options)) {
    count += 1;
    if (ends.includes(id)) break;
    ids.push(id);
    options.heard([...ids]);
  }
  return { found: [{ ids }], count };
}

answerBy(KINDS);

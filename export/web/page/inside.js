// Answers inside.html: runs one word through the exported graphs with onnxruntime-web, in the page itself.

import { tokens } from './greedy.js';
import { openModel } from './models.js';
import { startOf } from './rules.js';
import { Tokenizer } from './tokenizer.js';

let opened = null;

async function begin() {
  const read = async (path) => (await fetch(path)).json();
  const site = { ...(await read('site.json')), base: document.baseURI };
  const tokenizer = new Tokenizer(await read(`tokenizer.json?${site.files['tokenizer.json'].sha256.slice(0, 16)}`));
  const { model } = await openModel(site, site.inside, 'wasm', 1, () => {});
  return { site, tokenizer, model };
}

/** An id's text for display: a leading space becomes a mark, and bytes are never shown. */
function named(id, { config }, textOf) {
  const special = { [config.bos_id]: 'start', [config.eos_id]: 'end', [config.pad_id]: 'padding' };
  if (id in special) return special[id];
  const text = textOf([id]);
  if (text.includes('\ufffd')) return 'part of a character';
  return text.replace(/^ +/, (spaces) => '·'.repeat(spaces.length)).replace(/[\0-\x1f]/g, (sign) => String.fromCharCode(0x2400 + sign.charCodeAt(0))) || `#${id}`;
}

/** The graphs' values by the names of points, without the batch axis. */
const pointsOf = (taps, found) => Object.fromEntries(Object.entries(taps).filter(([, name]) => name in found).map(([point, name]) => (
  [point, { data: Float64Array.from(found[name].data), shape: found[name].dims.slice(1) }])));

/** Run a text through the whole model: {points, tokens, pieces, output, given, texts}. */
export async function read(text) {
  opened ??= begin();
  const { site, tokenizer, model } = await opened;
  const { generation } = site.config;
  const source = tokenizer.encode(generation.task_prefix + text);
  const written = [];
  for await (const { id } of tokens(model, source, { forced: generation.forced_first })) written.push(id);
  const target = [startOf(site.config), ...written.slice(0, -1)];
  const { encoder, decoder } = site.inside.taps;
  const S = source.length;
  const ids = { source_ids: model.int64(source, [1, S]), source_mask: model.int64(source.map(() => 1), [1, S]) };
  const { inputs } = model.names.encoder;
  const read = await model.encoder.run(Object.fromEntries(Object.entries(inputs).map(([value, name]) => [name, ids[value]])));
  const begun = await model.start(source);
  const shown = await begun.run([target], Object.keys(decoder));
  begun.dispose();
  const names = Object.fromEntries(Object.keys(decoder).map((point) => [point, point]));
  const asRead = (id) => named(id, site, (all) => tokenizer.sourceWords(all).map((word) => word.text).join(''));
  const asWritten = (id) => named(id, site, (all) => tokenizer.decode(all));
  return {
    points: { ...pointsOf(encoder, read), ...pointsOf(names, shown) },
    tokens: { source, target, written },
    pieces: { source: source.map(asRead), target: target.map(asWritten), written: written.map(asWritten) },
    text,
    output: tokenizer.decode(written).trim(),
    given: 0,
    texts: new Proxy({}, { get: (_, id) => asWritten(Number(id)) }),
  };
}

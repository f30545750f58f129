// Answers tasks with transformers.js alone, and opens graphs with ONNX Runtime's WebAssembly build, in Node.
//
//     node with_transformers.mjs TASKS.json ANSWERS.json
//
// Kinds and answers as in ../with_optimum.py. transformers.js runs on onnxruntime-node, whose binary is in its package.

import { readFileSync, writeFileSync } from 'node:fs';
import { basename, dirname, join } from 'node:path';

import {
  AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, AutoTokenizer, Tensor, env, pipeline,
} from '@huggingface/transformers';
import * as web from 'onnxruntime-web';

globalThis.fetch = async (url) => { throw new Error(`these tests use no network: ${url}`); };
env.allowRemoteModels = false;
env.useFSCache = false;
web.env.wasm.numThreads = 1;

const OPTIONS = { local_files_only: true };
const CLASSES = { 'encoder-decoder': AutoModelForSeq2SeqLM, decoder: AutoModelForCausalLM };

/** from_pretrained of this class (or any function of the model's name) for a folder on this disk. */
function load(call, folder) {
  env.localModelPath = dirname(folder);
  return call(basename(folder));
}
const tokenizerOf = (folder) => load((name) => AutoTokenizer.from_pretrained(name, OPTIONS), folder);
const modelOf = (kind, folder, more = {}) => load((name) => kind.from_pretrained(name, { ...OPTIONS, ...more }), folder);

const rowsOf = (tensor) => tensor.tolist().map((row) => row.map(Number));
const int64 = (rows) => new Tensor('int64', BigInt64Array.from(rows.flat(), BigInt), [rows.length, rows[0].length]);
/**
 * The row up to its first end after `prompt` tokens. A batch's generate stops when all rows happen to end at one step, or
 * at the limit: rows that have ended go on, and what they say then is no output.
 */
function untilEnd(row, prompt, model) {
  const ends = [model.generation_config.eos_token_id].flat();
  const end = row.findIndex((id, i) => i >= prompt && ends.includes(id));
  return end < 0 ? row : row.slice(0, end + 1);
}

const KINDS = {
  async tokenize({ folder, texts, rows }) {
    const tokenizer = await tokenizerOf(folder);
    return {
      ids: texts.map((text) => rowsOf(tokenizer(text).input_ids)[0]),
      texts: rows.map((row) => tokenizer.decode(row, { skip_special_tokens: true })),
    };
  },

  /** Ids of the prompt that a folder's template makes of a conversation. */
  async chat({ folder, messages }) {
    const options = { add_generation_prompt: true, return_tensor: false, return_dict: false };
    return (await tokenizerOf(folder)).apply_chat_template(messages, options);
  },

  async translate({ folder, texts, batch, max_new_tokens, dtype }) {
    const tokenizer = await tokenizerOf(folder);
    const model = await modelOf(AutoModelForSeq2SeqLM, folder, dtype && { dtype });
    const found = { ids: [], texts: [] };
    for (let start = 0; start < texts.length; start += batch) {
      const encoded = tokenizer(texts.slice(start, start + batch), { padding: true });
      const output = await model.generate({ ...encoded, max_new_tokens });
      const rows = rowsOf(output).map((row) => untilEnd(row, 1, model));
      found.ids.push(...rows);
      found.texts.push(...tokenizer.batch_decode(rows, { skip_special_tokens: true }));
    }
    return found;
  },

  async translation_pipeline({ folder, texts }) {
    const translator = await load((name) => pipeline('translation', name, OPTIONS), folder);
    const found = [];
    for (const text of texts) found.push((await translator(text))[0].translation_text);
    return found;
  },

  async generate({ folder, architecture, ids, mask, max_new_tokens }) {
    const model = await modelOf(CLASSES[architecture], folder);
    const output = await model.generate({ input_ids: int64(ids), attention_mask: int64(mask), max_new_tokens });
    const prompt = architecture === 'decoder' ? ids[0].length : 1;
    return rowsOf(output).map((row) => untilEnd(row, prompt, model));
  },

  async logits({ folder, ids, mask }) {
    const model = await modelOf(AutoModelForMaskedLM, folder);
    return (await model({ input_ids: int64(ids), attention_mask: int64(mask) })).logits.tolist();
  },

  /** Unit vectors of the mean of a text's tokens, as its caller names them. */
  async vectors({ folder, texts }) {
    const extractor = await load((name) => pipeline('feature-extraction', name, OPTIONS), folder);
    return (await extractor(texts, { pooling: 'mean', normalize: true })).tolist();
  },

  /** The same by one file that takes text, on ONNX Runtime's WebAssembly build, so many texts at a time. */
  async text_vectors({ file, texts, batch = texts.length }) {
    const session = await web.InferenceSession.create(readFileSync(file), { executionProviders: ['wasm'] });
    const vectors = [];
    for (let start = 0; start < texts.length; start += batch) {
      const part = texts.slice(start, start + batch);
      const { sentence_embedding: found } = await session.run({ text: new web.Tensor('string', part, [part.length]) });
      const width = found.dims[1];
      for (let i = 0; i < part.length; i += 1) vectors.push(Array.from(found.data.slice(i * width, (i + 1) * width)));
    }
    return vectors;
  },

  /** Open every graph ({name: whose data file it uses}), run the first one on {name: [type, data, dims]}. */
  async wasm({ folder, graphs, inputs, output }) {
    const sessions = [];
    for (const [name, owner] of Object.entries(graphs)) {
      const read = (file) => new Uint8Array(readFileSync(join(folder, 'onnx', file)));
      const data = `${owner}.onnx_data`;
      sessions.push(await web.InferenceSession.create(read(`${name}.onnx`), {
        executionProviders: ['wasm'], externalData: [{ path: data, data: read(data) }],
      }));
    }
    const feeds = Object.entries(inputs).map(([name, [type, data, dims]]) => [
      name, new web.Tensor(type, type === 'int64' ? BigInt64Array.from(data, BigInt) : Float32Array.from(data), dims),
    ]);
    const found = await sessions[0].run(Object.fromEntries(feeds));
    return { opened: sessions.length, output: Array.from(found[output].data) };
  },
};

const [tasks, answers] = process.argv.slice(2);
const found = {};
for (const { name, kind, ...task } of JSON.parse(readFileSync(tasks, 'utf-8'))) {
  try {
    found[name] = { value: await KINDS[kind](task) };
  } catch (error) {
    found[name] = { error: String(error.stack ?? error) };
  }
}
writeFileSync(answers, JSON.stringify(found));

// Runs a decoder in a worker, by Transformers.js; it answers the page's requests (KINDS).

import { fetched } from './files.js';
import { answerBy, graphics } from './requests.js';

const [PLACE, NAME] = ['/models/', 'model']; // for Transformers.js: `asked` finds the files
const PRIVATE = 0xE000; // characters without a meaning begin here

let [site, hub, tokenizer, model] = [null, null, null, null];

/** What Transformers.js fetches: a file of the opened model, whole and with the right digest, or "not found". */
async function asked(address, folder, heard) {
  const path = folder + decodeURI(new URL(address, site.base).pathname).slice(PLACE.length + NAME.length);
  if (!Object.hasOwn(site.files, path)) return new Response(null, { status: 404 });
  const bytes = await fetched(site, path, heard);
  return new Response(bytes, { headers: { 'Content-Length': String(bytes.length) } });
}

const KINDS = {
  async begin({ base }) {
    site = { ...(await (await fetch(new URL('site.json', base))).json()), base };
    hub = await import(new URL('ort/transformers.min.js', base));
    const { env } = hub;
    Object.assign(env, { allowRemoteModels: false, allowLocalModels: true, localModelPath: PLACE });
    Object.assign(env, { useBrowserCache: false, useWasmCache: false, logLevel: hub.LogLevel.ERROR });
    return { isolated: globalThis.crossOriginIsolated, ...await graphics() };
  },

  /** Open the site's model number `number`, in place of the previous one. */
  async open({ number, device, threads, say }) {
    const [{ folder, file, dtype, bytes }, began] = [site.models[number], performance.now()];
    await model?.dispose();
    [model, tokenizer] = [null, null];
    // The smaller build does without WebGPU, and has operators on the processor that the other lacks.
    const wasm = new URL(`ort/ort-wasm-simd-threaded${device === 'webgpu' ? '.asyncify' : ''}`, site.base).href;
    Object.assign(hub.env.backends.onnx.wasm, { numThreads: threads, wasmPaths: { mjs: `${wasm}.mjs`, wasm: `${wasm}.wasm` } });
    let arrived = 0;
    hub.env.fetch = (address) => asked(address, folder, (more) => say({ share: Math.min(1, (arrived += more) / bytes) }));
    tokenizer = await hub.AutoTokenizer.from_pretrained(NAME);
    model = await hub.AutoModelForCausalLM.from_pretrained(NAME, { device, dtype, model_file_name: file });
    return { seconds: (performance.now() - began) / 1000, threads };
  },

  /** The answer {text, tokens, ...} to a conversation [{role, content}], or the continuation of its text; parts {text}
   * are the text so far. */
  async answer({ messages, options, say, stopped: isStopped }) {
    const [ids, { max_positions: most }] = [promptOf(messages), site.config];
    const room = most + 1 - ids.length;
    if (room < 1) throw new Error(`The conversation has ${ids.length} tokens; the model takes at most ${most}: begin a new one.`);
    const [began, { sample, temperature, topK, topP, limit }] = [performance.now(), options];
    let [text, tokens, first] = ['', 0, null];
    const stopping = new hub.InterruptableStoppingCriteria();
    const streamer = new hub.TextStreamer(tokenizer, {
      skip_prompt: true,
      skip_special_tokens: true,
      token_callback_function() {
        tokens += 1;
        first ??= performance.now() - began;
        if (isStopped()) stopping.interrupt();
      },
      callback_function(piece) { say({ text: text += piece }); },
    });
    const int64 = (values) => new hub.Tensor('int64', BigInt64Array.from(values, BigInt), [1, ids.length]);
    const drawn = sample ? { do_sample: true, temperature, top_k: topK, top_p: topP } : { do_sample: false };
    const output = await model.generate({
      input_ids: int64(ids), attention_mask: int64(ids.map(() => 1)), max_new_tokens: Math.min(limit, room), ...drawn, num_beams: 1,
      streamer, stopping_criteria: stopping,
    });
    const seconds = (performance.now() - began) / 1000;
    const made = output.tolist()[0].map(Number).slice(ids.length);
    const ended = [model.generation_config.eos_token_id].flat().includes(made.at(-1));
    const cut = !ended && !isStopped();
    return { text, ids: made, prompt: ids.length, firstSeconds: first / 1000, tokensPerSecond: tokens / seconds, cut };
  },
};

/** Ids of a conversation by the model's template. A control token's spelling in a message is text: a mark within it
 * keeps it from being a token, and the ids of the parts around the mark follow each other. */
function promptOf(messages) {
  const plain = (text) => tokenizer.encode(text, { add_special_tokens: false });
  const all = messages.map(({ content }) => content).join('');
  if (!site.config.templates) return tokenizer.encode(all);
  let mark = PRIVATE;
  while (all.includes(String.fromCharCode(mark))) mark += 1;
  mark = String.fromCharCode(mark);
  const tokens = [...site.config.control_tokens].sort((a, b) => b.length - a.length);
  const marked = (text) => tokens.reduce((found, token) => found.replaceAll(token, token[0] + mark + token.slice(1)), text);
  const given = messages.map(({ role, content }) => ({ role, content: marked(content) }));
  const rendered = tokenizer.apply_chat_template(given, { add_generation_prompt: true, tokenize: false });
  return rendered.split(mark).flatMap(plain);
}

answerBy(KINDS);

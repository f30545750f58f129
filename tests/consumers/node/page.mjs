// Runs in the page: what with_chromium.mjs is asked, answered by onnxruntime-web alone or by transformers.js.

const ORT = '/node_modules/onnxruntime-web/dist/';
const say = (text) => { document.querySelector('pre').textContent += `${text}\n`; };

async function fetched(path) {
  const response = await fetch(path);
  if (!response.ok) throw new Error(`${response.status} ${path}`);
  return new Uint8Array(await response.arrayBuffer());
}

/** A session of this graph with the data file of its name (suffix and all), which is what a browser fetches. */
async function open(ort, folder, name, provider) {
  const path = `/models/${folder}/onnx/${name}.onnx`;
  const data = { path: `${name}.onnx_data`, data: await fetched(`${path}_data`) };
  // ONNX Runtime's own log, which says what runs each node, goes to the console.
  const options = { executionProviders: [provider], externalData: [data], logSeverityLevel: provider === 'webgpu' ? 0 : 2 };
  return ort.InferenceSession.create(await fetched(path), options);
}

const int64 = (ort, values, ...dims) => new ort.Tensor('int64', BigInt64Array.from(values, BigInt), dims);

/** Greedy decoding of rows of ids: padded on the right, one batch, tokens without start and end. */
async function greedy(ort, { encoder, decoder }, config, rows, limit) {
  const [B, S] = [rows.length, Math.max(...rows.map((row) => row.length))];
  const padded = rows.flatMap((row) => [...row, ...Array(S - row.length).fill(config.pad_token_id)]);
  const mask = int64(ort, rows.flatMap((row) => Array.from({ length: S }, (_, i) => Number(i < row.length))), B, S);
  const { last_hidden_state: memory } = await encoder.run({ input_ids: int64(ort, padded, B, S), attention_mask: mask });
  const past = {};
  for (const { name, shape } of decoder.inputMetadata.filter(({ name }) => name.startsWith('past_key_values.'))) {
    past[name] = new ort.Tensor('float32', [], [B, shape[1], 0, shape[3]]);
  }
  const found = rows.map(() => []);
  const done = rows.map(() => false);
  let last = rows.map(() => config.decoder_start_token_id);
  for (let t = 0; t < limit && done.includes(false); t++) {
    const { logits, ...present } = await decoder.run({
      ...past, input_ids: int64(ort, last, B, 1), encoder_hidden_states: memory, encoder_attention_mask: mask,
      use_cache_branch: new ort.Tensor('bool', [t > 0], [1]),
    });
    for (const [name, value] of Object.entries(present)) past[name.replace('present', 'past_key_values')] = value;
    const V = logits.dims[2];
    last = rows.map((_, b) => {
      let best = -1;
      for (let v = 0; v < V; v++) {
        const banned = v === config.pad_token_id || v === config.bos_token_id;
        if (!banned && (best < 0 || logits.data[b * V + v] > logits.data[b * V + best])) best = v;
      }
      done[b] ||= best === config.eos_token_id;
      if (!done[b]) found[b].push(best);
      return best;
    });
  }
  return found;
}

const KINDS = {
  /** onnxruntime-web and nothing else: rows of ids in, new ids out. suffix: of the graphs' files. */
  async ort({ folder, rows, batch, max_new_tokens, threads, provider = 'wasm', suffix = '' }) {
    const ort = await import(`${ORT}ort.${provider}.min.mjs`);
    Object.assign(ort.env.wasm, { wasmPaths: ORT, numThreads: threads });
    const config = await (await fetch(`/models/${folder}/config.json`)).json();
    const encoder = await open(ort, folder, `encoder_model${suffix}`, provider);
    const decoder = await open(ort, folder, `decoder_model_merged${suffix}`, provider);
    const found = [];
    for (let start = 0; start < rows.length; start += batch) {
      found.push(...await greedy(ort, { encoder, decoder }, config, rows.slice(start, start + batch), max_new_tokens));
    }
    // What it had at the end: without isolation it falls back to one thread, silently.
    return { ids: found, isolated: crossOriginIsolated, threads: ort.env.wasm.numThreads };
  },

  /** transformers.js: texts in, ids (as generate returns them, up to the end) and texts out. */
  async transformers({ folder, texts, batch, max_new_tokens, threads, device = 'wasm', dtype }) {
    const { AutoModelForSeq2SeqLM, AutoTokenizer, env } =
      await import('/node_modules/@huggingface/transformers/dist/transformers.min.js');
    Object.assign(env, { allowRemoteModels: false, allowLocalModels: true, localModelPath: '/models/', useBrowserCache: false });
    Object.assign(env.backends.onnx.wasm, { wasmPaths: ORT, numThreads: threads });
    const tokenizer = await AutoTokenizer.from_pretrained(folder);
    const model = await AutoModelForSeq2SeqLM.from_pretrained(folder, { device, ...(dtype && { dtype }) });
    const found = { ids: [], texts: [] };
    for (let start = 0; start < texts.length; start += batch) {
      const output = await model.generate({ ...tokenizer(texts.slice(start, start + batch), { padding: true }), max_new_tokens });
      const rows = output.tolist().map((row) => row.map(Number)).map((row) => {
        const end = row.indexOf(model.config.eos_token_id, 1);
        return end < 0 ? row : row.slice(0, end + 1);
      });
      found.ids.push(...rows);
      found.texts.push(...tokenizer.batch_decode(rows, { skip_special_tokens: true }));
    }
    return found;
  },
};

globalThis.answer = async ({ kind, ...task }) => {
  say(`${kind} ${JSON.stringify({ ...task, rows: undefined, texts: undefined })}`);
  return KINDS[kind](task);
};

// The page of web_host.py: holds ONNX Runtime Web sessions and runs them, one request at a time. It asks for each request
// with the reply to the one before. Messages as in web_host.py.

const SIZES = { float32: 4, int64: 8, bool: 1, uint8: 1, int8: 1 };
const ARRAYS = { float32: Float32Array, int64: BigInt64Array, bool: Uint8Array, uint8: Uint8Array, int8: Int8Array };
const PLACED = 'VerifyEachNodeIsAssignedToAnEp';

const { adapter: wanted, threads } = Object.fromEntries(new URLSearchParams(location.search));
const sessions = [];
const adapter = {}; // what ONNX Runtime was given last
let log = [];

function pack(header, payloads = []) {
  const text = new TextEncoder().encode(JSON.stringify(header));
  const length = new DataView(new ArrayBuffer(4));
  length.setUint32(0, text.length, true);
  return new Blob([length.buffer, text, ...payloads]);
}

function unpack(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  let at = 4 + length;
  const tensors = header.tensors.map(({ name, type, dims }) => {
    const end = at + dims.reduce((product, size) => product * size, SIZES[type]);
    const data = new ARRAYS[type](buffer.slice(at, end));
    at = end;
    return { name, type, dims, data };
  });
  return { header, tensors };
}

async function file(path) {
  const response = await fetch(`file?${new URLSearchParams({ path })}`);
  if (!response.ok) throw new Error(`${path}: ${response.status}`);
  return new Uint8Array(await response.arrayBuffer());
}

/** Lines of ONNX Runtime's log that say what runs each node. */
function listen() {
  for (const level of ['debug', 'log', 'info', 'warn', 'error']) {
    console[level] = (...words) => log.push(...words.join(' ').split('\n').filter((line) => line.includes(PLACED)));
  }
}

/** `adapter` describes what `requestAdapter` returned, and "software" asks for one that computes on the processor. */
function watchAdapters() {
  const request = navigator.gpu.requestAdapter.bind(navigator.gpu);
  navigator.gpu.requestAdapter = async (options = {}) => {
    const found = await request(wanted === 'software' ? { ...options, forceFallbackAdapter: true } : options);
    if (found) {
      const { vendor, architecture, device, description, isFallbackAdapter } = found.info;
      Object.assign(adapter, { vendor, architecture, device, description, software: isFallbackAdapter });
      adapter.float16 = found.features.has('shader-f16');
    }
    return found;
  };
  return navigator.gpu.requestAdapter();
}

async function open(ort, { open: path, data, level }) {
  const externalData = [];
  for (const entry of data) externalData.push({ path: entry.path, data: await file(entry.file) });
  const extra = level ? { session: { qdq_matmulnbits_accuracy_level: level } } : {};
  // The most talkative level, for the lines about nodes.
  const options = { executionProviders: ['webgpu'], externalData, extra, logSeverityLevel: 0 };
  log = [];
  sessions.push(await ort.InferenceSession.create(await file(path), options));
  return pack({ session: sessions.length - 1, adapter, placed: log });
}

async function run(ort, { session, outputs }, tensors) {
  const feeds = Object.fromEntries(tensors.map(({ name, type, data, dims }) => [name, new ort.Tensor(type, data, dims)]));
  const found = await sessions[session].run(feeds, outputs);
  const described = outputs.map((name) => ({ name, type: found[name].type, dims: found[name].dims }));
  return pack({ tensors: described }, outputs.map((name) => found[name].data));
}

async function main() {
  let reply;
  let ort;
  try {
    if (!navigator.gpu || !await watchAdapters()) throw new Error('it has no WebGPU adapter (chrome://gpu says why)');
    listen();
    ort = await import('./ort/ort.webgpu.min.mjs');
    Object.assign(ort.env.wasm, { wasmPaths: new URL('ort/', location).href, numThreads: Number(threads) });
    ort.env.logLevel = 'verbose';
    reply = pack({ adapter, browser: navigator.userAgent });
  } catch (error) {
    reply = pack({ error: String(error?.message ?? error) });
  }
  for (;;) {
    const response = await fetch('next', { method: 'POST', body: reply });
    if (response.status === 204) {
      reply = null; // nothing was asked for a while
      continue;
    }
    if (!response.ok) return;
    try {
      const { header, tensors } = unpack(await response.arrayBuffer());
      reply = 'open' in header ? await open(ort, header) : await run(ort, header, tensors);
    } catch (error) {
      reply = pack({ error: String(error?.message ?? error) });
    }
  }
}

main();

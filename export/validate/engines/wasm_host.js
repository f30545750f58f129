// Holds ONNX Runtime Web sessions for the engine in wasm_engine.py and runs them, one request at a time.
// node wasm_host.js PATH_OF_ONNXRUNTIME_WEB THREADS
//
// Messages as in web_host.py.

const fs = require('fs');
const path = require('path');

const SIZES = { float32: 4, int64: 8, bool: 1 };
const ARRAYS = { float32: Float32Array, int64: BigInt64Array, bool: Uint8Array };

const still = new Int32Array(new SharedArrayBuffer(4));

// Node may set a pipe to non-blocking: an empty or a full one is waited for.
function patiently(act) {
  for (;;) {
    try {
      return act();
    } catch (error) {
      if (error.code !== 'EAGAIN') throw error;
      Atomics.wait(still, 0, 0, 1);
    }
  }
}

function read(length) {
  const bytes = Buffer.alloc(length);
  for (let at = 0; at < length; ) {
    const got = patiently(() => fs.readSync(0, bytes, at, length - at, null));
    if (got === 0) process.exit(0); // the other side has gone
    at += got;
  }
  return bytes;
}

function write(bytes) {
  for (let at = 0; at < bytes.length; ) at += patiently(() => fs.writeSync(1, bytes, at, bytes.length - at));
}

function send(header, payloads = []) {
  const text = Buffer.from(JSON.stringify(header));
  const length = Buffer.alloc(4);
  length.writeUInt32LE(text.length);
  [length, text, ...payloads].forEach(write);
}

function count(dims) {
  return dims.reduce((product, size) => product * size, 1);
}

async function main() {
  const [, , folder, threads] = process.argv;
  const ort = require(path.join(folder, 'dist', 'ort.node.min.js'));
  const version = JSON.parse(fs.readFileSync(path.join(folder, 'package.json'), 'utf8')).version;
  ort.env.wasm.numThreads = Number(threads);
  ort.env.logLevel = 'error';
  const sessions = [];
  send({ version, node: process.versions.node });
  for (;;) {
    const request = JSON.parse(read(read(4).readUInt32LE()).toString());
    const feeds = {};
    for (const { name, type, dims } of request.tensors || []) {
      const bytes = read(count(dims) * SIZES[type]);
      feeds[name] = new ort.Tensor(type, new ARRAYS[type](bytes.buffer, bytes.byteOffset, count(dims)), dims);
    }
    try {
      if ('open' in request) {
        const externalData = request.data.map((entry) => ({ path: entry.path, data: fs.readFileSync(entry.file) }));
        const extra = request.level ? { session: { qdq_matmulnbits_accuracy_level: request.level } } : {};
        const options = { executionProviders: ['wasm'], externalData, extra };
        sessions.push(await ort.InferenceSession.create(fs.readFileSync(request.open), options));
        send({ session: sessions.length - 1 });
      } else {
        const found = await sessions[request.session].run(feeds, request.outputs);
        const tensors = request.outputs.map((name) => ({ name, type: found[name].type, dims: found[name].dims }));
        send({ tensors }, request.outputs.map((name) => {
          const data = found[name].data;
          return Buffer.from(data.buffer, data.byteOffset, data.byteLength);
        }));
      }
    } catch (error) {
      send({ error: String((error && error.message) || error) });
    }
  }
}

main().catch((error) => {
  process.stderr.write(`${error.stack || error}\n`);
  process.exit(1);
});

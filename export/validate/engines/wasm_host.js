// Holds ONNX Runtime Web sessions for the engine in graph_runtimes.py and runs them, one request at a time. It asks for each
// request with the reply to the one before. Messages as in web_host.py.
// node wasm_host.js ADDRESS PATH_OF_ONNXRUNTIME_WEB THREADS

const fs = require('fs');
const path = require('path');

const SIZES = { float32: 4, int64: 8, bool: 1, uint8: 1, int8: 1 };
const ARRAYS = { float32: Float32Array, int64: BigInt64Array, bool: Uint8Array, uint8: Uint8Array, int8: Int8Array };

function pack(header, payloads = []) {
  const text = Buffer.from(JSON.stringify(header));
  const length = Buffer.alloc(4);
  length.writeUInt32LE(text.length);
  return Buffer.concat([length, text, ...payloads]);
}

function unpack(ort, buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const request = JSON.parse(Buffer.from(buffer, 4, length).toString());
  const feeds = {};
  let at = 4 + length;
  for (const { name, type, dims } of request.tensors) {
    const end = at + dims.reduce((product, size) => product * size, SIZES[type]);
    feeds[name] = new ort.Tensor(type, new ARRAYS[type](buffer.slice(at, end)), dims);
    at = end;
  }
  return { request, feeds };
}

async function main() {
  const [, , address, folder, threads] = process.argv;
  const ort = require(path.join(folder, 'dist', 'ort.node.min.js'));
  const version = JSON.parse(fs.readFileSync(path.join(folder, 'package.json'), 'utf8')).version;
  ort.env.wasm.numThreads = Number(threads);
  ort.env.logLevel = 'error';
  const sessions = [];
  let reply = pack({ version, node: process.versions.node });
  for (;;) {
    const response = await fetch(`${address}next`, { method: 'POST', body: reply });
    if (response.status === 204) {
      reply = null; // nothing was asked for a while
      continue;
    }
    if (!response.ok) process.exit(0);
    const { request, feeds } = unpack(ort, await response.arrayBuffer());
    try {
      if ('open' in request) {
        const externalData = request.data.map((entry) => ({ path: entry.path, data: fs.readFileSync(entry.file) }));
        const extra = request.level ? { session: { qdq_matmulnbits_accuracy_level: request.level } } : {};
        const options = { executionProviders: ['wasm'], externalData, extra };
        sessions.push(await ort.InferenceSession.create(fs.readFileSync(request.open), options));
        reply = pack({ session: sessions.length - 1 });
      } else {
        const found = await sessions[request.session].run(feeds, request.outputs);
        const tensors = request.outputs.map((name) => ({ name, type: found[name].type, dims: found[name].dims }));
        reply = pack({ tensors }, request.outputs.map((name) => {
          const data = found[name].data;
          return Buffer.from(data.buffer, data.byteOffset, data.byteLength);
        }));
      }
    } catch (error) {
      reply = pack({ error: String((error && error.message) || error) });
    }
  }
}

main().catch((error) => {
  process.stderr.write(`${error.stack || error}\n`);
  process.exit(1);
});

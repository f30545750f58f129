// Fetches a model's files and opens them with onnxruntime-web.

import { SearchModel } from './search.js';
import { StepModel, isKept } from './steps.js';

const memories = [];

/** Record every WebAssembly memory made after this call: their sizes tell a model's memory. */
export function watchMemory() {
  const { Memory } = WebAssembly;
  WebAssembly.Memory = new Proxy(Memory, {
    construct(target, given) {
      const made = new target(...given);
      memories.push(made);
      return made;
    },
  });
}

/** Bytes of WebAssembly memory. */
export const memoryInUse = () => memories.reduce((sum, { buffer }) => sum + buffer.byteLength, 0);

async function isDigest(bytes, expected) {
  if (!globalThis.crypto?.subtle) return true; // without https browsers have no digests
  const found = new Uint8Array(await crypto.subtle.digest('SHA-256', bytes));
  return Array.from(found, (byte) => byte.toString(16).padStart(2, '0')).join('') === expected;
}

/** Fetch a whole file of the site; `heard` is called with each part's bytes. */
export async function fetched(site, path, heard = () => {}) {
  const { bytes: size, sha256 } = site.files[path];
  // The digest in the address keeps caches from mixing up versions of a file.
  const response = await fetch(new URL(`${path}?${sha256.slice(0, 16)}`, site.base));
  if (!response.ok) throw new Error(`${path}: the server answers ${response.status}.`);
  const bytes = new Uint8Array(size);
  let at = 0;
  for (const reader = response.body.getReader(); ;) {
    const { done, value } = await reader.read();
    if (done) break;
    if (at + value.length <= size) bytes.set(value, at);
    at += value.length;
    heard(value.length);
  }
  if (at !== size || !(await isDigest(bytes, sha256))) {
    throw new Error(`${path}: arrived damaged; load the page again, or write the site again.`);
  }
  return bytes;
}

async function runtime(site, device, threads) {
  const build = device === 'webgpu' ? 'webgpu' : 'wasm';
  const ort = await import(new URL(`ort/ort.${build}.min.mjs`, site.base));
  ort.env.wasm.wasmPaths = new URL('ort/', site.base).href;
  ort.env.wasm.numThreads = threads;
  ort.env.logLevel = 'error';
  return ort;
}

/** Open one of the site's models: a StepModel or a SearchModel. heard(share): share of its files loaded, 0 to 1. */
export async function openModel(site, model, device, threads, heard) {
  const total = model.bytes;
  let arrived = 0;
  const more = (bytes) => heard((arrived += bytes) / total);
  const ort = await runtime(site, device, threads);
  const files = new Map(); // graphs may share a data file
  const once = (path) => files.get(path) ?? files.set(path, fetched(site, path, more)).get(path);
  const sessions = {};
  for (const [name, { graph, data }] of Object.entries(model.graphs)) {
    const externalData = await Promise.all(data.map(async (each) => ({
      path: each.name, data: await once(each.file),
    })));
    const options = { executionProviders: [device], externalData, logSeverityLevel: 3 };
    if (device === 'webgpu') options.preferredOutputLocation = cachesOnDevice(name, model);
    sessions[name] = await ort.InferenceSession.create(await fetched(site, graph, more), options);
  }
  const kind = model.kind === 'search' ? SearchModel : StepModel;
  return { model: new kind(ort, sessions, site.config, model.names), sessions: Object.values(sessions), threads: ort.env.wasm.numThreads };
}

/** Keep keys and values on the device. */
function cachesOnDevice(name, model) {
  if (name !== 'decoder') return {};
  const outputs = Object.entries(model.names.decoder.outputs);
  return Object.fromEntries(outputs.filter(([value]) => isKept(value)).map(([, name]) => [name, 'gpu-buffer']));
}

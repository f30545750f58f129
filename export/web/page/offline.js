// Registers the service worker, tells which files it has cached, and offers to keep all.

import { find, megabytes } from './view.js';

const PATIENCE = 5000; // milliseconds

/** Resolves once the service worker handles requests, or if there is none. */
export async function controlled() {
  const workers = navigator.serviceWorker;
  if (!workers) return;
  try {
    await workers.register(new URL('service_worker.js', document.baseURI));
  } catch {
    return; // a private window, or service workers are switched off
  }
  if (workers.controller) return;
  await Promise.race([
    new Promise((resolve) => workers.addEventListener('controllerchange', resolve, { once: true })),
    new Promise((resolve) => setTimeout(resolve, PATIENCE)),
  ]);
}

/** The site's files not yet cached: [path]; all of them without a cache. */
async function missing(files) {
  const paths = Object.keys(files);
  if (!navigator.serviceWorker?.controller) return paths;
  const kept = await Promise.all(paths.map((path) => caches.match(addressed(path, files[path]))));
  return paths.filter((_, i) => !kept[i]);
}

/** Fetch files to have them cached. heard(bytes): called after each. */
async function keep(files, paths, heard) {
  for (const path of paths) {
    const response = await fetch(addressed(path, files[path]));
    if (!response.ok) throw new Error(`${path}: the server answers ${response.status}.`);
    await response.arrayBuffer();
    await stored(addressed(path, files[path]));
    heard(files[path].bytes);
  }
}

/** Wait until the service worker has stored a file, which takes longer than passing it on. */
async function stored(address) {
  for (const begun = performance.now(); performance.now() - begun < 12 * PATIENCE; ) {
    if (await caches.match(address)) return;
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  throw new Error('This browser has no room for all files.');
}

const addressed = (path, { sha256 }) => new URL(`${path}?${sha256.slice(0, 16)}`, document.baseURI).href;

/** The button that keeps all of the site's files. attempt: shows the error of a promise. */
export async function offerOffline(files, attempt) {
  const left = await missing(files);
  const bytes = left.reduce((sum, path) => sum + files[path].bytes, 0);
  const able = Boolean(navigator.serviceWorker?.controller);
  Object.assign(find('keep'), { hidden: !able || !left.length, textContent: `Keep all for offline use (${megabytes(bytes)} MB more)` });
  find('kept').textContent = able && !left.length ? 'All files are kept on this device: the page works offline.' : '';
  find('keep').onclick = () => attempt(keepAll(files, left, attempt));
}

async function keepAll(files, left, attempt) {
  find('keep').disabled = true;
  let kept = 0;
  try {
    await keep(files, left, (bytes) => { find('kept').textContent = `${megabytes((kept += bytes))} MB`; });
  } finally {
    find('keep').disabled = false;
    await offerOffline(files, attempt);
  }
}

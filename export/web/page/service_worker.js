// Keeps the site's files, so it works without a network. Above this line stand FILES, {path: digest}, and SHELL, the
// paths of the page itself. A new version has other digests, so browsers install it as a new service worker.

const CACHE = `mlx-transformer ${self.registration.scope}`;
const SCOPE = new URL(self.registration.scope).pathname;
// If the server doesn't send these headers, threads work from the second visit on.
const ISOLATION = {
  'Cross-Origin-Opener-Policy': 'same-origin',
  'Cross-Origin-Embedder-Policy': 'require-corp',
  'Cross-Origin-Resource-Policy': 'same-origin',
};

const addressed = (path) => new URL(`${path}?${FILES[path]}`, self.registration.scope).href;

self.addEventListener('install', (event) => {
  const filled = caches.open(CACHE).then((cache) => cache.addAll(SHELL.map(addressed)));
  event.waitUntil(filled.then(() => self.skipWaiting()));
});

self.addEventListener('activate', (event) => {
  event.waitUntil(removeOthers().then(() => self.clients.claim()));
});

async function removeOthers() {
  const cache = await caches.open(CACHE);
  const current = new Set(Object.keys(FILES).map(addressed));
  for (const { url } of await cache.keys()) if (!current.has(url)) await cache.delete(url);
}

self.addEventListener('fetch', (event) => {
  const { pathname, search, origin } = new URL(event.request.url);
  if (event.request.method !== 'GET' || origin !== self.location.origin || !pathname.startsWith(SCOPE)) return;
  const path = decodeURI(pathname.slice(SCOPE.length)) || 'index.html';
  // A page of an earlier version asks for its own files.
  const isCurrent = Object.hasOwn(FILES, path) && (search === '' || search === `?${FILES[path]}`);
  if (isCurrent) event.respondWith(answered(path, event));
});

async function answered(path, event) {
  const cache = await caches.open(CACHE);
  let response = await cache.match(addressed(path));
  if (!response) {
    response = await fetch(addressed(path));
    if (response.ok) event.waitUntil(cache.put(addressed(path), response.clone()).catch(() => {})); // no room: not kept
  }
  const headers = new Headers(response.headers);
  for (const [name, value] of Object.entries(ISOLATION)) headers.set(name, value);
  return new Response(response.body, { status: response.status, statusText: response.statusText, headers });
}

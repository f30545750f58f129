// Fetches the site's files, and compares them with their digests.

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

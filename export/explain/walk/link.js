// The page's state in the address, after #: a copied link shows the same page, and nothing is sent anywhere.

const NUMBERS = ['model', 'word', 'step', 'layer', 'head', 'column', 'temperature', 'topK', 'beam', 'alpha', 'width'];
let written = '';

const offText = ({ parts = [], ...whole }) => [...Object.keys(whole), ...parts.map((part) => part.join('.'))].join('~');

function offOf(text) {
  const off = {};
  for (const each of text.split('~').filter(Boolean)) {
    const part = each.split('.').map((word) => (/^\d+$/.test(word) ? Number(word) : word));
    if (part.length === 1) off[each] = true;
    else (off.parts ??= []).push(part);
  }
  return off;
}

/** Write the differences from the initial state into the address. */
export function writeLink(state, start) {
  const found = new URLSearchParams({ text: state.text, stack: state.stack });
  for (const name of [...NUMBERS, 'key']) if (state[name] !== start[name]) found.set(name, state[name]);
  if (Object.keys(state.off).length) found.set('off', offText(state.off));
  if (written === `#${found}`) return; // browsers bear a hundred of these in half a minute
  written = `#${found}`;
  history.replaceState(null, '', written);
}

/** Apply an address that this page didn't write itself; missing values are the initial ones. */
export function readLink(state, start) {
  if (location.hash.length < 2 || location.hash === written) return false;
  const found = new URLSearchParams(location.hash.slice(1));
  for (const name of NUMBERS) {
    const value = Number(found.get(name) ?? start[name]);
    state[name] = Number.isFinite(value) ? value : start[name];
  }
  if (found.has('text')) state.text = found.get('text');
  if (['encoder', 'decoder'].includes(found.get('stack'))) state.stack = found.get('stack');
  state.key = found.has('key') ? Number(found.get('key')) : null;
  state.off = offOf(found.get('off') ?? '');
  return true;
}

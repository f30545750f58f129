// Long work in slices: between two the page answers keys and clicks.

const SLICE = 30; // milliseconds
let began = 0;

/** Wait until other events are handled, if this slice has lasted long enough. */
export async function rest() {
  if (performance.now() - began < SLICE) return;
  await new Promise((go) => { setTimeout(go); });
  began = performance.now();
}

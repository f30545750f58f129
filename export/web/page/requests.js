// A worker's side of client.js: requests are answered one after another, in messages {id, ...}: first parts {part}, then
// {answer} or {error}. A request {stop: id} ends that request at its next step.

/** Answer requests by the functions {kind: ({..., say, stopped}) => answer}. */
export function answerBy(kinds) {
  const stopped = new Set();
  let queue = Promise.resolve();
  globalThis.onmessage = ({ data: { id, stop, kind, ...given } }) => {
    if (stop !== undefined) {
      stopped.add(stop);
      return;
    }
    queue = queue.then(async () => {
      try {
        if (stopped.has(id)) return globalThis.postMessage({ id, answer: null });
        const say = (part) => globalThis.postMessage({ id, part });
        const answer = await kinds[kind]({ ...given, say, stopped: () => stopped.has(id) });
        return globalThis.postMessage({ id, answer });
      } catch (error) {
        return globalThis.postMessage({ id, error: String(error.message ?? error) });
      } finally {
        stopped.delete(id);
      }
    });
  };
}

/** Whether there is WebGPU, and whether it has float16. */
export async function graphics() {
  const adapter = await navigator.gpu?.requestAdapter().catch(() => null);
  return { webgpu: Boolean(adapter), float16: Boolean(adapter?.features.has('shader-f16')) };
}

// The page's side of worker.js.

export class Client {
  #worker = new Worker(new URL('worker.js', import.meta.url), { type: 'module' });
  #waiting = new Map();
  #next = 0;

  constructor() {
    this.#worker.onmessage = ({ data: { id, part, answer, error } }) => {
      const { heard, resolve, reject } = this.#waiting.get(id);
      if (part !== undefined) return heard(part);
      this.#waiting.delete(id);
      if (error !== undefined) return reject(new Error(error));
      return resolve(answer);
    };
    this.#worker.onerror = ({ message }) => {
      for (const { reject } of this.#waiting.values()) reject(new Error(message ?? 'A file of the page could not be run.'));
      this.#waiting.clear();
    };
  }

  /** Send a request and return its answer; `heard` is called with parts of it. The promise's `stop` ends it early,
   * with null if it had not begun. */
  ask(kind, given = {}, heard = () => {}) {
    const id = this.#next++;
    const answer = new Promise((resolve, reject) => this.#waiting.set(id, { heard, resolve, reject }));
    this.#worker.postMessage({ id, kind, ...given });
    answer.stop = () => this.#waiting.has(id) && this.#worker.postMessage({ stop: id });
    return answer;
  }
}

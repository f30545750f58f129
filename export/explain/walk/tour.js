// A tour of sixty seconds: eight captions over the live page. Space, a swipe or a button continues; a click elsewhere
// stops, and so does the focus.

import { escaped } from '../../../mlx_transformer/page/kit.js';

export class Tour {
  /** captions: [{station, said}]. otherwise(station): a text for this model, if it differs. go(station): scroll to
   * it. */
  constructor(place, captions, otherwise, go) {
    Object.assign(this, { place, captions, otherwise, go, at: -1 });
    place.addEventListener('click', ({ target }) => {
      if (target.dataset.tour === 'next') this.next();
      if (target.dataset.tour === 'stop') this.stop();
    });
    let from = null;
    place.addEventListener('touchstart', ({ touches }) => { from = touches[0].clientX; }, { passive: true });
    place.addEventListener('touchend', ({ changedTouches }) => { if (from - changedTouches[0].clientX > 40) this.next(); });
    document.addEventListener('click', ({ target }) => {
      if (this.at >= 0 && target.isConnected && !place.contains(target) && target.id !== 'tour-start') this.stop();
    });
    document.addEventListener('focusin', ({ target }) => { if (this.at >= 0 && !place.contains(target)) this.stop(); });
    document.addEventListener('keydown', (event) => {
      if (this.at < 0) return;
      if (event.key === 'Escape') this.stop();
      if (event.key === ' ' && !event.target.closest('button, input, select, summary')) {
        event.preventDefault();
        this.next();
      }
    });
  }

  start() {
    this.at = -1;
    this.next();
  }

  next() {
    this.at += 1;
    if (this.at >= this.captions.length) return this.stop();
    const { station, said } = this.captions[this.at];
    const last = this.at + 1 === this.captions.length;
    this.place.hidden = false;
    this.place.innerHTML = `<p aria-live="polite"><small>${this.at + 1} of ${this.captions.length}</small> ${escaped(this.otherwise(station) ?? said)}</p>`
      + `<p><button type="button" data-tour="next">${last ? 'done' : 'next (space)'}</button> <button type="button" data-tour="stop">stop</button></p>`;
    this.place.querySelector('button').focus({ preventScroll: true });
    this.go(station);
  }

  /** The keyboard goes on from the title of the station that is shown. */
  stop() {
    const { station } = this.captions[Math.min(this.at, this.captions.length - 1)];
    const within = this.place.contains(document.activeElement);
    this.at = -1;
    this.place.hidden = true;
    if (within) document.getElementById(`${station}-title`)?.focus({ preventScroll: true });
  }
}

// Draws the views of the page's own sentence, and of another one once the walk computes it.
import { moreOf } from './walk/more.js';

const own = JSON.parse(document.getElementById("data").textContent);
const title = document.getElementById("more-views");
const ran = document.getElementById("more-ran");
const [ownTitle, ownRan] = [[...title.childNodes], ran.textContent];
let shownNow = null;
let earlier = null;

const follow = (data) => {
  if (data === shownNow) return;
  earlier?.abort();
  earlier = new AbortController();
  shownNow = data;
  title.replaceChildren(...(data === own ? ownTitle : [`More views: ${data.text}${data.output ? ` → ${data.output}` : ""}`]));
  ran.textContent = data === own ? ownRan : `Run by this page, in float64${data.whole ? "" : ", with what is switched off"}.`;
  draw(data, earlier.signal);
};

addEventListener("walked", ({ detail: { model, pass, tree, whole } }) => {
  if (whole && pass.text === own.text) return follow(own);
  const found = moreOf(model, pass, tree, whole);
  return follow({ ...own, ...found, beam: own.beam && found.beam });
});
follow(own);

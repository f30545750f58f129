// Follow a word; every head of every layer; the alignment of source and target.
const FOLLOW = { model: 0, layer: -1, head: -1, pinned: null };

const follow = () => {
  const card = byId("follow");
  const sides = Object.keys(data.sides);
  const chips = {};
  const said = make("p", { className: "said", "aria-live": "polite" });
  const threads = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  threads.setAttribute("class", "threads");
  threads.setAttribute("aria-hidden", "true");
  let active = null;

  // For a token of a side: [the other side, its weights, their meaning, the pieces that label its tokens].
  const looks = (side, at) => {
    const { model, layer, head } = FOLLOW;
    const found = [];
    for (const kind of kinds) {
      const [asking, asked] = kind.of;
      const clip = (count) => (layer < count ? layer : -1);
      const l = clip(kind.layers);
      if (asking === side) {
        found.push([asked, [...Array(kind.columns).keys()].map((c) => kind.mean(model, l, head, at, c)), "looks at", kind, kind.named[1]]);
      } else if (asked === side) {
        found.push([asking, [...Array(kind.rows).keys()].map((r) => kind.mean(model, l, head, r, at)), "is looked at by", kind, kind.named[0]]);
      }
    }
    return found;
  };
  const best = (side, values) =>
    values
      .map((value, i) => [value, i])
      .sort((a, b) => b[0] - a[0])
      .slice(0, 4)
      .filter(([value]) => value > 0.005)
      .map(([value, i]) => `${quotedAt(side, i)} ${number(value, DIGITS)}`)
      .join(", ");

  const clear = () => {
    for (const side of sides) for (const chip of chips[side]) {
      chip.style.background = "";
      chip.style.color = "";
      chip.classList.remove("on");
    }
    threads.replaceChildren();
  };
  const show = (side, at) => {
    active = [side, at];
    clear();
    chips[side][at].classList.add("on");
    const lines = [];
    const from = chips[side][at].getBoundingClientRect();
    const frame = card.getBoundingClientRect();
    threads.setAttribute("viewBox", `0 0 ${frame.width} ${frame.height}`);
    for (const [other, values, words, kind, named] of looks(side, at)) {
      const rgb = words === "looks at" ? palette.high : palette.more;
      values.forEach((value, i) => {
        const chip = chips[other][i];
        chip.style.background = `rgb(${mixed(palette.low, rgb, Math.min(1, value) ** 0.75).join(" ")})`;
        if (value > 0.65) chip.style.color = "var(--card)";
        if (other === side || value < 0.04) return;
        const to = chip.getBoundingClientRect();
        const [x1, x2] = [from, to].map((box) => box.left + box.width / 2 - frame.left + card.scrollLeft);
        const down = to.top > from.top;
        const [y1, y2] = down ? [from.bottom - frame.top, to.top - frame.top] : [from.top - frame.top, to.bottom - frame.top];
        const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
        const bend = (y2 - y1) / 2;
        line.setAttribute("d", `M${x1} ${y1}C${x1} ${y1 + bend} ${x2} ${y2 - bend} ${x2} ${y2}`);
        line.setAttribute("fill", "none");
        line.setAttribute("stroke", `rgb(${rgb.join(" ")})`);
        line.setAttribute("stroke-width", 1 + 5 * value);
        line.setAttribute("opacity", 0.25 + 0.7 * value);
        threads.append(line);
      });
      const tokens = best(named, values);
      if (tokens) lines.push(`${words} ${tokens} (${kind.name.toLowerCase()})`);
    }
    const id = idsOf(side)[at];
    const place = side === "target" ? `while writing ${quotedAt(side, at)} (${readAt(side, at)})` : `${quotedAt(side, at)}, id ${id}`;
    said.textContent = `${place}, position ${at}: ${lines.join("; ")}.`;
  };
  const again = () => (active ? show(...active) : null);

  for (const side of sides) {
    chips[side] = idsOf(side).map((id, i) => {
      const chip = make(
        "button",
        { className: "chip", type: "button", "aria-description": `position ${i}, id ${id}`, "aria-pressed": "false" },
        ...shown(labels(side)[i]),
        make("small", {}, readAt(side, i) || `${i} · ${id}`),
      );
      chip.addEventListener("pointerenter", () => FOLLOW.pinned || show(side, i));
      chip.addEventListener("focus", () => FOLLOW.pinned || show(side, i));
      chip.addEventListener("click", () => {
        const same = FOLLOW.pinned && FOLLOW.pinned[0] === side && FOLLOW.pinned[1] === i;
        for (const one of Object.values(chips).flat()) one.setAttribute("aria-pressed", "false");
        FOLLOW.pinned = same ? null : [side, i];
        if (!same) chip.setAttribute("aria-pressed", "true");
        show(side, i);
      });
      return chip;
    });
  }
  const layers = Math.max(...kinds.map((kind) => kind.layers));
  const heads = Math.max(...kinds.map((kind) => kind.heads));
  const change = (name) => (value) => {
    FOLLOW[name] = value;
    again();
  };
  const named = { source: data.architecture === "encoder" ? "text" : "source", target: "while writing" };
  card.append(
    make(
      "div",
      { className: "controls" },
      select("layer", layerOptions(layers, true), -1, change("layer")),
      select("head", layerOptions(heads, true), -1, change("head")),
      data.runtimes.length > 1 ? radios("run by", runtimeOptions(false), 0, change("model")) : null,
    ),
  );
  sides.forEach((side, i) => {
    card.append(make("h3", {}, side === "target" ? "while writing" : `${named[side]} (position · id)`));
    card.append(make("div", { className: "chips", role: "group", "aria-label": named[side] }, ...chips[side]));
    if (i + 1 < sides.length) card.append(make("div", { className: "gap", "aria-hidden": "true" }));
  });
  card.append(said, threads);
  painted.add(again);
  addEventListener("resize", again, { signal });
  const masked = idsOf(sides[0]).findIndex((id) => textOf(id) === "▢");
  const lengths = idsOf(sides[0]).map((id) => (["start", "end", "padding"].includes(textOf(id)) ? 0 : textOf(id).length));
  show(sides[0], masked >= 0 ? masked : lengths.indexOf(Math.max(...lengths)));
};

const headCell = (kind, layer, head, model) =>
  model === 2
    ? (r, c) => diverging(kind.largest(layer, head) ? kind.difference(layer, head, r, c) / kind.largest(layer, head) : 0)
    : (r, c) => sequential(kind.weight(model, layer, head, r, c));

const largeMap = (kind, first, model) => {
  const dialog = byId("large");
  let [layer, head] = first;
  let undo = () => {};
  const place = make("div", { className: "wide" });
  const title = make("strong");
  const draw = () => {
    undo();
    title.textContent = `${kind.name}, layer ${layer + 1}, head ${head + 1}${model === 2 ? ": difference" : ""}`;
    const [rows, columns] = kind.named.map(labels);
    const value = (r, c) =>
      model === 2 ? number(kind.difference(layer, head, r, c), 3) : number(kind.weight(model, layer, head, r, c), DIGITS);
    undo = matrix(place, {
      rows,
      columns,
      value,
      colour: headCell(kind, layer, head, model),
      name: title.textContent,
      say: (r, c) => `‹${rows[r]}› at ${r} ${model === 2 ? "differs in how it looks" : "looks"} at ‹${columns[c]}› at ${c}: ${value(r, c)}`,
    });
  };
  const step = (by) => () => {
    const n = (layer * kind.heads + head + by + kind.layers * kind.heads) % (kind.layers * kind.heads);
    [layer, head] = [Math.floor(n / kind.heads), n % kind.heads];
    draw();
  };
  const button = (text, name, action) => {
    const made = make("button", { type: "button", "aria-label": name }, text);
    made.addEventListener("click", action);
    return made;
  };
  dialog.replaceChildren(
    make(
      "header",
      {},
      title,
      make(
        "span",
        {},
        button("‹", "previous head", step(-1)),
        " ",
        button("›", "next head", step(1)),
        " ",
        button("close", "close", () => dialog.close()),
      ),
    ),
    place,
  );
  dialog.onclose = () => undo();
  dialog.showModal();
  draw();
};

const maps = () => {
  const card = byId("maps");
  let model = 0;
  const place = make("div", { className: "kinds" });
  const note = make("p", { className: "note" });
  const draw = () => {
    place.replaceChildren();
    for (const kind of kinds) {
      const size = Math.max(44, Math.min(140, Math.floor(900 / kind.heads) - 18));
      const scale = size / Math.max(kind.rows, kind.columns);
      const cells = [make("span")];
      for (let head = 0; head < kind.heads; head++) cells.push(make("span", { className: "at" }, `head ${head + 1}`));
      for (let layer = 0; layer < kind.layers; layer++) {
        cells.push(make("span", { className: "at" }, `layer ${layer + 1}`));
        for (let head = 0; head < kind.heads; head++) {
          const canvas = make("canvas", { "aria-hidden": "true" });
          canvas.style.width = `${Math.round(kind.columns * scale)}px`;
          canvas.style.height = `${Math.round(kind.rows * scale)}px`;
          const colour = headCell(kind, layer, head, model);
          const redraw = () => canvas.isConnected && paint(canvas, kind.rows, kind.columns, colour);
          const apart = data.runtimes.length > 1 ? `Δ ${number(kind.largest(layer, head), 2)}` : "";
          const name = `${kind.name}, layer ${layer + 1}, head ${head + 1}${apart && `, ${apart}`}: enlarge`;
          const open = make(
            "button",
            { className: "map", type: "button", "aria-label": name },
            canvas,
            apart ? make("small", {}, apart) : null,
          );
          open.addEventListener("click", () => largeMap(kind, [layer, head], model));
          cells.push(open);
          painted.add(redraw);
          paint(canvas, kind.rows, kind.columns, colour);
        }
      }
      const grid = make("div", { className: "grid" }, ...cells);
      grid.style.gridTemplateColumns = `max-content repeat(${kind.heads}, max-content)`;
      place.append(make("div", {}, make("h3", {}, kind.name), grid));
    }
    note.textContent =
      model === 2
        ? "Second less first: orange where the second attends more, blue where less; each map in parts of its own largest difference, which stands under it."
        : "Each row is a token that looks, each column one that is looked at; a row adds up to 1. What a token may not look at (in a decoder: what comes later) has weight 0.";
  };
  const bar = make("i");
  const legend = make("span", { className: "legend", "aria-hidden": "true" }, "0", bar, "1");
  bar.style.background = "linear-gradient(90deg, var(--low), var(--high))";
  card.append(
    make(
      "div",
      { className: "controls" },
      data.runtimes.length > 1
        ? radios("shown", runtimeOptions(true), 0, (value) => {
            model = value;
            draw();
          })
        : null,
      legend,
    ),
    note,
    place,
  );
  draw();
};

const alignment = () => {
  const kind = kindOf("cross");
  byId("alignment-section").hidden = !kind;
  if (!kind) return;
  let layer = data.layer;
  let model = 0;
  let undo = () => {};
  const place = make("div");
  const rows = labels("target");
  const columns = labels("source");
  const draw = () => {
    undo();
    const weight = (r, c, of = model) => kind.mean(of, layer, -1, r, c);
    const difference = (r, c) => {
      const all = [...Array(kind.heads).keys()].map((head) => kind.difference(layer, head, r, c));
      return all.reduce((a, b) => a + b, 0) / kind.heads;
    };
    const most = model < 2 ? 1 : Math.max(1e-12, ...rows.flatMap((_, r) => columns.map((_, c) => Math.abs(difference(r, c)))));
    const value = (r, c) => (model === 2 ? number(difference(r, c), 3) : number(weight(r, c), DIGITS));
    undo = matrix(place, {
      rows,
      columns,
      value,
      colour: model === 2 ? (r, c) => diverging(difference(r, c) / most) : (r, c) => sequential(weight(r, c)),
      name: `Alignment, layer ${layer + 1}`,
      say: (r, c) => `‹${rows[r]}› is written with ${value(r, c)} on ‹${columns[c]}›`,
    });
  };
  byId("alignment").append(
    make(
      "div",
      { className: "controls" },
      select("layer", layerOptions(kind.layers, false), layer, (value) => {
        layer = value;
        draw();
      }),
      data.runtimes.length > 1
        ? radios("alignment of", runtimeOptions(true), 0, (value) => {
            model = value;
            draw();
          })
        : null,
    ),
    place,
  );
  draw();
};

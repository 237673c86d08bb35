// Drawings of an answer's figures, as SVG. Each says the same in words to those who do not see it.

import { make, svg } from "./dom.js";
import { count, percent, time, tokens } from "./format.js";

/** Sources of KV in the order of the legend. `remembered` is false for what was computed now. */
export const SOURCES = {
  device: { label: "remembered, in the device’s memory", remembered: true },
  host: { label: "remembered, in main memory", remembered: true },
  disk: { label: "remembered, on disk", remembered: true },
  remote: { label: "remembered, on another machine", remembered: true },
  chunk: { label: "remembered from elsewhere in a text (approximate)", remembered: true },
  computed: { label: "read now", remembered: false },
};

export const PHASES = {
  queue: "waiting and preparing",
  lookup: "looking up",
  load: "fetching what was remembered",
  compute: "reading the rest",
};

const labelOf = (source) => SOURCES[source]?.label ?? source;
const fillOf = (source) => `url(#fill-${source in SOURCES ? source : "device"})`;

/** Runs of [source, tokens] as { source, from, to }, `to` excluded. */
export function spansOf(runs) {
  let at = 0;
  return runs.map(([source, size]) => ({ source, from: at, to: (at += size) }));
}

const CELL = 12;
const GAP = 2;
const COLUMNS = 28;
const MOST_CELLS = 504;

/** A map of the prompt: one square per block of `blockSize` tokens, or per several blocks of a very long prompt. */
export function strip(runs, blockSize) {
  const total = runs.reduce((sum, [, size]) => sum + size, 0);
  const blocksPerCell = Math.max(1, Math.ceil(total / blockSize / MOST_CELLS));
  const perCell = blockSize * blocksPerCell;
  const rows = Math.max(1, Math.ceil(total / perCell / COLUMNS));
  const words = runs.map(([source, size]) => `${tokens(size)} ${labelOf(source)}`).join(", then ");
  const picture = svg("svg", {
    class: "strip",
    viewBox: `0 0 ${COLUMNS * (CELL + GAP) - GAP} ${rows * (CELL + GAP) - GAP}`,
    role: "img",
    "aria-label": `The prompt from its beginning: ${words}.`,
  });
  for (const { source, from, to } of spansOf(runs)) {
    for (let cell = Math.floor(from / perCell); cell * perCell < to; cell++) {
      const start = Math.max(from, cell * perCell) / perCell - cell;
      const end = Math.min(to, (cell + 1) * perCell) / perCell - cell;
      picture.append(square(source, cell, start, end));
    }
  }
  return { picture, blocksPerCell };
}

/** The part of a cell, from `start` to `end` of its width, that came from `source`. */
function square(source, cell, start, end) {
  const border = source === "computed" ? 1.5 : 0;
  return svg("rect", {
    class: `cell ${source}`,
    "data-source": source,
    x: (cell % COLUMNS) * (CELL + GAP) + start * CELL + border / 2,
    y: Math.floor(cell / COLUMNS) * (CELL + GAP) + border / 2,
    width: Math.max((end - start) * CELL - border, 0.5),
    height: CELL - border,
    rx: 1.5,
    fill: fillOf(source),
  });
}

/** A legend entry: the pattern, what it means, and a figure. */
export function legendItem(pattern, text, figure) {
  const swatch = svg("svg", { class: "swatch", viewBox: "0 0 14 14", "aria-hidden": "true" });
  const hollow = pattern === "computed" || pattern === "compute";
  swatch.append(svg("rect", { class: hollow ? "computed" : "", x: 1, y: 1, width: 12, height: 12, rx: 1.5, fill: `url(#fill-${pattern})` }));
  return make("li", {}, swatch, make("span", {}, text), make("b", {}, figure));
}

/** One bar, `parts` of [name, ms] side by side. */
export function stackedBar(parts) {
  const width = 400;
  const total = parts.reduce((sum, [, ms]) => sum + ms, 0) || 1;
  const words = parts.map(([name, ms]) => `${PHASES[name]} ${time(ms)}`).join(", ");
  const picture = svg("svg", {
    class: "stacked", viewBox: `0 0 ${width} 18`, preserveAspectRatio: "none", role: "img", "aria-label": `${words}.`,
  });
  let x = 0;
  for (const [name, ms] of parts) {
    if (ms <= 0) continue;
    const wide = (ms / total) * width;
    const hollow = name === "compute" ? 1.5 : 0;
    picture.append(svg("rect", {
      class: `segment ${name === "compute" ? "computed" : name}`, "data-phase": name, x: x + hollow / 2, y: hollow / 2,
      width: Math.max(wide - hollow, 0.5), height: 18 - hollow, fill: `url(#fill-${name})`,
    }));
    x += wide;
  }
  return picture;
}

const BAR = 44;
const TALL = 72;
const MOST_BARS = 8;

/** Hit rate per question as columns, the latest last, with the time to the first word below each. */
export function history(all) {
  const shown = all.slice(-MOST_BARS);
  const first = all.length - shown.length + 1;
  const words = shown.map((f, i) => `question ${first + i}: ${percent(f.cached / f.prompt)} remembered, ${time(f.ttft)}`);
  const picture = svg("svg", {
    class: "history", viewBox: `0 0 ${MOST_BARS * BAR} ${TALL + 48}`, role: "img", "aria-label": `${words.join("; ")}.`,
  });
  const base = TALL + 16;
  shown.forEach((f, i) => {
    const x = i * BAR;
    const high = (f.cached / f.prompt) * TALL;
    picture.append(
      svg("rect", { class: "computed", x: x + 6.75, y: base - TALL + 0.75, width: BAR - 13.5, height: TALL - 0.75, fill: "url(#fill-computed)" }),
      svg("rect", { x: x + 6, y: base - high, width: BAR - 12, height: high, fill: "url(#fill-device)" }),
      svg("text", { class: "strong", x: x + BAR / 2, y: base - TALL - 4 }, percent(f.cached / f.prompt)),
      svg("text", { class: "strong", x: x + BAR / 2, y: base + 13 }, time(f.ttft)),
      svg("text", { x: x + BAR / 2, y: base + 28 }, count(first + i)),
    );
  });
  return picture;
}

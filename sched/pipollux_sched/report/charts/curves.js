// Curves over one horizontal axis, in stacked panels: the reported values, and a smoothed curve.

import { SPELL, xTicks, yTicks } from "./axes.js";
import { h, s } from "./dom.js";
import { Figure, textWidth } from "./figure.js";

const PER_TICK = 86;
const [TOP, BOTTOM, RIGHT, LEFT] = [14, 26, 10, 50]; // LEFT: the same for all, so that times are aligned
const MANY = 60; // above so many points, the reported values are drawn thin, under a smoothed curve

/**
 * @param spec {
 *   title, x: { kind, name, low, high, log }, bands: [[from, to]], marks: [{ at, label, flag, elastic }],
 *   panels: [{ name, head, unit, kind, height, zero, smooth, high, lines: [{ name, style, colour, pieces }] }] }
 * `kind` is one of SPELL; `style` "" (the first), "second", "step" or "area"; `pieces` are lists of
 * [x, y], between which the curve is cut; `colour` the number of a job's, or of none for that around.
 */
export class Curves extends Figure {
  constructor(spec) {
    super("course");
    this.hidden = new Set();
    const names = new Map(spec.panels.flatMap((panel) => panel.lines).map((line) => [line.name, line]));
    this.legend = names.size > 1 && spec.panels.some((panel) => panel.lines.length > 1)
      ? h("p", { class: "legend" }, ...[...names.values()].map((line) => this.#key(line))) : null;
    this.element = h("div", { class: "curve" }, this.canvas, this.legend);
    this.update(spec);
  }

  update(spec) {
    this.spec = spec;
    const xs = new Set();
    for (const line of this.#lines()) for (const piece of line.pieces) for (const [x] of piece) xs.add(x);
    this.xs = [...xs].sort((a, b) => a - b);
    this.plot.setAttribute("aria-label", this.#describe());
    this.draw();
  }

  whole() {
    const { low, high } = this.spec.x;
    return high > low ? [low, high] : [low - 0.5, low + 0.5];
  }

  draw() {
    if (!this.width || !this.spec) return;
    const last = this.spec.panels.length - 1;
    const drawings = this.spec.panels.map((panel, i) => this.#panel(panel, i === 0, i === last));
    this.place(...drawings);
    this.cursors = drawings.map((drawing) => drawing.appendChild(s("g", { class: "cursor" })));
    this.drawings = drawings;
    this.mark(this.selected);
  }

  // Reading with pointer and keys

  things() {
    const [low, high] = this.domain;
    return this.xs.filter((x) => x >= low && x <= high);
  }

  at(x) {
    return x;
  }

  under(_event, offset) {
    const things = this.things();
    const of = (x) => Math.abs(this.scale.apply(x) - offset);
    return things.length ? things.reduce((best, x) => (of(x) < of(best) ? x : best)) : null;
  }

  tell(x) {
    const { kind, name } = this.spec.x;
    const mark = this.spec.marks.filter((one) => one.at <= x).at(-1)?.label;
    const first = `${name && kind === "whole" ? `${name} ` : ""}${SPELL[kind].value(x)}${mark ? ` · ${mark}` : ""}`;
    return [first, ...this.spec.panels.flatMap((panel) => this.#shown(panel).flatMap((line) => {
      const value = valueAt(line, x);
      return value === undefined ? [] : [[line.name, spelt(panel, value)]];
    }))];
  }

  mark(x) {
    this.cursors?.forEach((cursor, i) => {
      cursor.replaceChildren();
      if (x === null) return;
      const { drawings: { [i]: drawing }, spec: { panels: { [i]: panel } } } = this;
      const [left, y] = [this.scale.apply(x), drawing.scale("y")];
      const [bottom, top] = y.range;
      cursor.append(s("line", { x1: left, x2: left, y1: top, y2: bottom }));
      for (const line of this.#shown(panel)) {
        const value = valueAt(line, x);
        if (value !== undefined) cursor.append(s("circle", { class: "dot", fill: shade(line), cx: left, cy: y.apply(value), r: 3.5 }));
      }
    });
  }

  // Drawing

  #lines() {
    return this.spec.panels.flatMap((panel) => panel.lines);
  }

  #shown(panel) {
    return panel.lines.filter((line) => !this.hidden.has(line.name));
  }

  #key(line) {
    const toggle = (event) => {
      const shown = !this.hidden.delete(line.name);
      if (shown) this.hidden.add(line.name);
      event.currentTarget.setAttribute("aria-pressed", String(!shown));
      this.draw();
    };
    const chip = line.colour === undefined ? `key ${line.style}` : "chip";
    return h("button", { type: "button", class: "key-of", "aria-pressed": "true", click: toggle }, h("span", { class: `${chip} ${line.colour === undefined ? "" : `job-${line.colour % 8}`}` }), line.name);
  }

  #describe() {
    const told = this.spec.panels.map((panel) => {
      const values = valuesOf(panel.lines[0] ?? { pieces: [] });
      if (!values.length) return `${panel.name}: nothing reported yet`;
      return `${panel.name}: from ${spelt(panel, low(values))} to ${spelt(panel, high(values))}, last ${spelt(panel, values.at(-1))}`;
    });
    return `${this.spec.title ? `${this.spec.title}. ` : ""}${told.join("; ")}; arrow keys read it`;
  }

  #panel(panel, first, last) {
    const { x, bands, marks } = this.spec;
    const lines = this.#shown(panel);
    const [from, to] = this.domain;
    const values = panel.lines.flatMap(valuesOf);
    const ticks = values.length ? heights(panel, values) : [0, 1];
    const flags = first ? this.#flags(marks, from, to) : [];
    const top = TOP + (flags.length ? 12 : 0) + (panel.head ? 16 : 0);
    const wanted = Math.floor((this.width - LEFT) / (x.kind === "moment" ? PER_TICK : PER_TICK * 0.9));
    const marksX = last ? xTicks(x.kind, from, to, wanted) : [];
    const labels = new Map(marksX.map((one) => [one.value, one.label]));
    const bottom = last ? BOTTOM + (x.name ? 16 : 0) : 8;
    return Plot.plot({
      className: "drawing",
      width: this.width, height: panel.height + top + bottom,
      marginLeft: LEFT, marginRight: RIGHT, marginTop: top, marginBottom: bottom,
      x: { domain: [from, to], type: x.log ? "log" : "linear", axis: null },
      y: { domain: [ticks[0], ticks.at(-1)], axis: null },
      marks: [
        Plot.gridY(ticks, { className: "rules" }),
        Plot.text(ticks, { className: "ticks", y: (value) => value, frameAnchor: "left", textAnchor: "end", dx: -8, text: (value) => (values.length ? SPELL[panel.kind].tick(value) : "") }),
        Plot.rect(bands.filter(([a, b]) => b > from && a < to), { className: "pause", x1: (band) => Math.max(band[0], from), x2: (band) => Math.min(band[1], to), fill: `url(#hatch-${this.spec.colour ?? 0})` }),
        ...[["restart", false], ["change", true]].map(([className, elastic]) =>
          Plot.ruleX(marks.filter((one) => one.at >= from && one.at <= to && Boolean(one.elastic) === elastic), { className, x: "at", insetTop: -8 })),
        Plot.text(flags, { className: "flags", x: "at", frameAnchor: "top", dy: -14, text: "label", textAnchor: (flag) => flag.anchor }),
        ...(last ? [
          Plot.ruleY([ticks[0]], { className: "stroke" }),
          Plot.axisX(marksX.map((one) => one.value), { className: "ticks", tickFormat: (value) => labels.get(value), tickSize: 4, tickPadding: 6, label: null }),
          x.name ? Plot.text([x.name], { className: "ticks", frameAnchor: "bottom-right", textAnchor: "end", dy: 36 }) : null,
        ] : []),
        ...lines.flatMap((line) => this.#curve(line, panel)),
        panel.head ? Plot.text([panel.head], { className: "head", frameAnchor: "top-left", textAnchor: "start", dx: -LEFT, dy: 4 - top }) : null,
        values.length ? null : Plot.text(["nothing reported yet"], { className: "nothing", frameAnchor: "middle" }),
      ],
    });
  }

  /** Draw the labels of marks, without those that would overlap another. */
  #flags(marks, from, to) {
    const room = this.width - LEFT - RIGHT;
    let free = 0;
    return marks.flatMap(({ at, flag }) => {
      if (!flag || at < from || at > to) return [];
      const place = ((at - from) / (to - from)) * room;
      const half = textWidth(flag, 12.5) / 2 + 4;
      const middle = Math.max(half, Math.min(place, room - half));
      if (middle - half < free) return [];
      free = middle + half + 6;
      return [{ at: from + (middle / room) * (to - from), label: flag, anchor: "middle" }];
    });
  }

  #curve(line, panel) {
    const options = { x: 0, y: 1, z: 2, stroke: shade(line), clip: true };
    const flat = (pieces) => pieces.flatMap((piece, i) => piece.map(([x, y]) => [x, y, i]));
    const path = (pieces, kind) => Plot.line(flat(pieces), { ...options, x: (p) => p[0], y: (p) => p[1], z: (p) => p[2], className: `${kind} ${line.style}`, curve: isStep(line) ? "step-after" : "linear" });
    const number = line.pieces.reduce((sum, piece) => sum + piece.length, 0);
    const lone = line.pieces.filter((piece) => piece.length === 1).flat();
    const dots = lone.length ? [Plot.dot(lone, { x: (p) => p[0], y: (p) => p[1], r: 2, fill: shade(line), stroke: null, clip: true, className: "dots" })] : [];
    if (line.style === "area") {
      const area = Plot.areaY(flat(line.pieces), { x: (p) => p[0], y: (p) => p[1], z: (p) => p[2], fill: shade(line), className: "area", curve: "step-after", clip: true });
      return [area, path(line.pieces, "mean"), ...dots];
    }
    if (!panel.smooth || line.style || number <= MANY) return [path(line.pieces, "mean"), ...dots];
    const span = smoothingSpan(number);
    return [path(line.pieces, "raw"), path(line.pieces.map((piece) => smoothed(piece, span)), "mean"), ...dots];
  }
}

const shade = (line) => (line.style === "second" ? "var(--ink)" : line.colour === undefined ? "var(--c)" : `var(--job-${line.colour % 8})`);
const isStep = (line) => line.style === "step" || line.style === "area";
/** All values of a curve. */
export const valuesOf = (line) => line.pieces.flatMap((piece) => piece.map((point) => point[1]));
const low = (values) => values.reduce((a, b) => Math.min(a, b));
const high = (values) => values.reduce((a, b) => Math.max(a, b));
/** Return a value of a panel, with its unit. */
export const spelt = (panel, value) => `${SPELL[panel.kind].value(value)}${panel.unit && panel.kind !== "seconds" ? ` ${panel.unit}` : ""}`;

/** Return the ticks of a panel, whose range is as tight as its values allow. */
function heights(panel, values) {
  const [least, most] = [low(values), Math.max(high(values), panel.high ?? -Infinity)];
  const wanted = panel.height < 80 ? 2 : panel.height < 120 ? 3 : 4;
  const whole = panel.kind === "whole";
  if (panel.zero && least >= 0) return yTicks(0, most || 1, wanted, whole);
  const room = least === most ? (Math.abs(least) || 1) / 2 : 0;
  return yTicks(least - room, most + room, wanted, whole);
}

/** Return the value of a curve at a position; for steps, the value in force there. */
function valueAt(line, x) {
  for (const piece of line.pieces) {
    const found = isStep(line) ? (x <= piece.at(-1)[0] || piece === line.pieces.at(-1) ? piece.findLast((point) => point[0] <= x) : undefined) : piece.find((point) => point[0] === x);
    if (found) return found[1];
  }
  return undefined;
}

/** Split points where a restart lies between two of them. */
export function split(points, all) {
  const marks = all.filter((mark) => !mark.elastic);
  const pieces = [[]];
  let next = 0;
  for (const point of points) {
    const before = next;
    while (next < marks.length && marks[next].at <= point[0]) next += 1;
    if (next > before && pieces.at(-1).length) pieces.push([]);
    pieces.at(-1).push(point);
  }
  return pieces[0].length ? pieces : [];
}

/** Return the smoothing window for a number of points: a twentieth, 3 to 61, odd. */
function smoothingSpan(number) {
  return Math.max(3, Math.min(61, Math.floor(number / 20))) | 1;
}

/**
 * Smooth each value by a least-squares line through its `span` neighbours. A line, not a mean, so
 * that a steep curve is not shifted where its window is cut at an end.
 */
export function smoothed(points, span) {
  const reach = Math.max(1, Math.floor(span / 2));
  return points.map(([x], i) => {
    const first = Math.max(0, i - reach);
    const near = points.slice(first, i + reach + 1).map((point) => point[1]);
    const [middle, mean] = [(near.length - 1) / 2, near.reduce((a, b) => a + b) / near.length];
    const spread = near.reduce((sum, _, j) => sum + (j - middle) ** 2, 0) || 1;
    const slope = near.reduce((sum, value, j) => sum + (j - middle) * value, 0) / spread;
    return [x, mean + slope * (i - first - middle)];
  });
}

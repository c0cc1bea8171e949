// Curves over time as SVG: axes with round ticks and units, restarts, and a cursor for pointer and keys.

import { ticks, timeTicks } from "./axes.js";
import { h, s, say } from "./dom.js";
import { moment, number, short } from "./format.js";
import { Hover, onWidth } from "./hover.js";

const HEIGHT = 190;
const TOP = 14;
const BOTTOM = 26;
const RIGHT = 10;
const PER_TICK = 86;
const LEFT = 50; // the same for all, so that what lies one above the other is of one time
const LETTER = 7;
const MANY = 60; // points above which what is reported is drawn thin, and a mean over it

/** One picture of one or two curves over time. */
export class Chart {
  /**
   * @param title what it is a picture of
   * @param unit of its values, as "samples/s"
   * @param lines [{ name, kind }]; kind: "" (the first), "second", "step"
   * @param options.zero whether the axis begins at 0; options.spell: spells a value;
   * options.smooth: draw a mean over many values; options.least: between two ticks
   */
  constructor(title, unit, lines, { zero = true, spell = null, smooth = false, least = 0 } = {}) {
    Object.assign(this, { title, unit, lines, zero, smooth, least });
    this.spell = spell ?? ((value) => (unit ? `${number(value)} ${unit}` : number(value)));
    this.hover = new Hover();
    this.last = h("b");
    this.svg = s("svg", { class: "plot", tabindex: 0, role: "img", height: HEIGHT });
    this.canvas = h("div", { class: "canvas" }, this.svg, this.hover.element);
    const legend = lines.length > 1 ? lines.map((line) => h("span", { class: `key ${line.kind}` }, line.name)) : [];
    this.element = h("figure", { class: "curve" },
      h("figcaption", {}, h("span", { class: "what" }, title, unit ? h("i", {}, ` ${unit}`) : null), this.last, ...legend),
      this.canvas);
    this.data = { series: [], from: 0, to: 1, marks: [] };
    this.width = 0;
    onWidth(this.canvas, (width) => {
      this.width = width;
      this.draw();
    });
    this.svg.addEventListener("pointermove", (event) => this.#point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.#at(null));
    this.svg.addEventListener("blur", () => this.#at(null));
    this.svg.addEventListener("keydown", (event) => this.#key(event));
  }

  /**
   * @param series for each line its [[time, value], …], without those that are unknown
   * @param from, to: the span of time; marks: [{ time, label }] of restarts
   */
  update(series, { from, to, marks }) {
    this.data = { series, from, to: Math.max(to, from + 1), marks };
    this.draw();
  }

  draw() {
    const { series, from, to } = this.data;
    const values = series.flatMap((points) => points.map((point) => point[1]));
    this.element.classList.toggle("empty", values.length === 0);
    const newest = series[0]?.at(-1);
    say(this.last, newest ? this.spell(newest[1]) : "");
    this.svg.setAttribute("aria-label", this.#describe(values));
    if (!this.width) return;
    const [low, high] = this.#bounds(values);
    const marksY = values.length ? ticks(low, high, 4, this.least) : [0, 1];
    const spelt = marksY.map((value) => (values.length ? short(value) : ""));
    const left = LEFT;
    const [bottom, top] = [marksY[0], marksY.at(-1)];
    this.x = (time) => left + ((time - from) / (to - from)) * (this.width - left - RIGHT);
    this.y = (value) => HEIGHT - BOTTOM - ((value - bottom) / (top - bottom)) * (HEIGHT - TOP - BOTTOM);
    this.svg.setAttribute("width", this.width);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.svg.replaceChildren(
      this.#grid(marksY, spelt, left),
      ...this.#marks(),
      ...series.flatMap((points, i) => this.#line(points, this.lines[i].kind)),
      (this.cursor = s("g", { class: "cursor" })),
    );
    if (!values.length) {
      this.svg.append(s("text", { class: "nothing", x: this.width / 2, y: HEIGHT / 2 }, "nothing reported yet"));
    }
    this.#at(this.selected ?? null);
  }

  #describe(values) {
    if (!values.length) return `${this.title}: nothing reported yet`;
    const range = [Math.min(...values), Math.max(...values)].map((value) => this.spell(value));
    return `${this.title}: from ${range[0]} to ${range[1]}, last ${this.last.textContent}; arrow keys read it`;
  }

  #bounds(values) {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    if (this.zero && low >= 0) return [0, high || 1];
    return low === high ? [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2] : [low, high];
  }

  #grid(marksY, spelt, left) {
    const { from, to } = this.data;
    const base = HEIGHT - BOTTOM;
    const wanted = Math.floor((this.width - left) / PER_TICK);
    const group = s("g", { class: "axes" });
    marksY.forEach((value, i) => {
      const y = this.y(value);
      group.append(s("line", { class: "rule", x1: left, x2: this.width - RIGHT, y1: y, y2: y }));
      group.append(s("text", { class: "tick", x: left - 8, y: y + 4, "text-anchor": "end" }, spelt[i]));
    });
    for (const { value, label } of timeTicks(from, to, wanted)) {
      const x = this.x(value);
      group.append(s("line", { class: "stroke", x1: x, x2: x, y1: base, y2: base + 4 }));
      const half = (label.length * LETTER) / 2;
      const middle = Math.max(half, Math.min(x, this.width - half));
      group.append(s("text", { class: "tick", x: middle, y: base + 18, "text-anchor": "middle" }, label));
    }
    group.append(s("line", { class: "stroke", x1: left, x2: this.width - RIGHT, y1: base, y2: base }));
    return group;
  }

  #marks() {
    return this.data.marks.map(({ time }) => {
      const x = this.x(time);
      return s("line", { class: "restart", x1: x, x2: x, y1: TOP - 8, y2: HEIGHT - BOTTOM });
    });
  }

  /** A curve, broken where the job was started anew. */
  #line(points, kind) {
    const pieces = split(points, this.data.marks);
    if (kind === "step") return pieces.map((piece) => this.#path(piece, "mean step", true));
    const smooth = this.smooth && kind === "" && points.length > MANY;
    const drawn = smooth
      ? pieces.flatMap((piece) => [this.#path(piece, `raw ${kind}`), this.#path(mean(piece), `mean ${kind}`)])
      : pieces.map((piece) => this.#path(piece, `mean ${kind}`));
    const lone = pieces.filter((piece) => piece.length === 1).map(([[time, value]]) =>
      s("circle", { class: `dot ${kind}`, cx: this.x(time), cy: this.y(value), r: 2 }));
    return [...drawn, ...lone];
  }

  #path(points, kind, steps = false) {
    const text = points.map(([time, value], i) => {
      const [x, y] = [this.x(time).toFixed(1), this.y(value).toFixed(1)];
      return i === 0 ? `M${x},${y}` : steps ? `H${x}V${y}` : `L${x},${y}`;
    });
    return s("path", { class: kind, d: text.join("") });
  }

  // The cursor

  #times() {
    return (this.data.series[0] ?? []).map((point) => point[0]);
  }

  #point(offset) {
    const times = this.x ? this.#times() : [];
    if (times.length) this.#at(nearest(times, offset, this.x));
  }

  #key(event) {
    const times = this.#times();
    if (event.key === "Escape") return this.#at(null);
    const now = this.selected === undefined || this.selected === null ? times.length : times.indexOf(this.selected);
    const leap = Math.max(Math.floor(times.length / 10), 1);
    const to = { ArrowLeft: now - 1, ArrowRight: now + 1, PageUp: now - leap, PageDown: now + leap, Home: 0, End: times.length - 1 }[event.key];
    if (to === undefined || !times.length) return undefined;
    event.preventDefault();
    return this.#at(times[Math.max(0, Math.min(to, times.length - 1))]);
  }

  /** Put the cursor at the point nearest to a time, or take it away. */
  #at(wanted) {
    const times = wanted === null ? [] : this.#times();
    const time = times.length ? nearest(times, wanted, (value) => value) : null;
    this.selected = time;
    this.cursor?.replaceChildren();
    if (time === null || !this.x) return this.hover.hide();
    const x = this.x(time);
    this.cursor.append(s("line", { x1: x, x2: x, y1: TOP - 8, y2: HEIGHT - BOTTOM }));
    const told = this.data.series.flatMap((points, i) => {
      const value = this.#value(points, time, this.lines[i].kind);
      if (value === undefined) return [];
      this.cursor.append(s("circle", { class: `dot ${this.lines[i].kind}`, cx: x, cy: this.y(value), r: 3.5 }));
      return [[this.lines[i].name, this.spell(value)]];
    });
    const generation = this.data.marks.filter((mark) => mark.time <= time).at(-1)?.label;
    return this.hover.show(x, TOP, [moment(time) + (generation ? ` · ${generation}` : ""), ...told]);
  }

  #value(points, time, kind) {
    if (kind === "step") return points.filter((point) => point[0] <= time).at(-1)?.[1];
    return points.find((point) => point[0] === time)?.[1];
  }
}

function nearest(times, wanted, of) {
  return times.reduce((best, time) => (Math.abs(of(time) - wanted) < Math.abs(of(best) - wanted) ? time : best));
}

/** Split points where a mark lies between two of them. */
function split(points, marks) {
  const pieces = [[]];
  let next = 0;
  for (const point of points) {
    const before = next;
    while (next < marks.length && marks[next].time <= point[0]) next += 1;
    if (next > before && pieces.at(-1).length) pieces.push([]);
    pieces.at(-1).push(point);
  }
  return pieces;
}

/** The mean over neighbours, of fewer at the ends. */
function mean(points) {
  const reach = Math.max(Math.round(points.length / 40), 1);
  return points.map(([time], i) => {
    const around = points.slice(Math.max(i - reach, 0), i + reach + 1);
    return [time, around.reduce((sum, point) => sum + point[1], 0) / around.length];
  });
}

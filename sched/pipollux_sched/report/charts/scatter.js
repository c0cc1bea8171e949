// Predicted against measured values on two logarithmic axes: near the diagonal they agree.

import { SPELL, xTicks } from "./axes.js";
import { h } from "./dom.js";
import { Figure, textWidth } from "./figure.js";

const SIDE = 500; // at most
const [SCATTER_LEFT, SCATTER_BELOW, SCATTER_TOP] = [72, 44, 26];

/** @param spec { title, name, band, points: [{ x, y, first, colour, words, tip }] }; `name`: [of x, of y] */
export class Scatter extends Figure {
  constructor(spec) {
    super("scatter", { zooms: false });
    this.spec = spec;
    const all = spec.points.flatMap((point) => [point.x, point.y, point.first]);
    this.ends = [Math.min(...all) / 1.35, Math.max(...all) * 1.35];
    this.element = h("div", { class: "square" }, this.canvas);
    this.plot.setAttribute("aria-label", `${spec.title}; arrow keys read it`);
  }

  whole() {
    return this.ends;
  }

  things() {
    return this.spec.points;
  }

  at(point) {
    return point.x;
  }

  under(event) {
    return this.points?.get(document.elementFromPoint(event.clientX, event.clientY)) ?? null;
  }

  tell(point) {
    return point.tip;
  }

  mark(point) {
    for (const [dot, one] of this.points ?? []) dot.classList.toggle("chosen", one === point);
  }

  draw() {
    if (!this.width) return;
    const [low, high] = this.ends;
    const width = Math.min(this.width, SIDE);
    const { points, name, band } = this.spec;
    const ticks = xTicks("length", low, high, Math.floor(width / 90));
    const values = ticks.map((tick) => tick.value);
    const shade = (point) => `var(--job-${point.colour % 8})`;
    const corners = [[low * band, low], [high, high / band], [high, high], [high / band, high], [low, low * band], [low, low]];
    const scale = { type: "log", domain: [low, high], axis: null };
    const spell = SPELL.length.tick;
    const labels = this.#labels(points, width, low, high);
    const drawing = Plot.plot({
      className: "drawing",
      width, height: width - SCATTER_LEFT + SCATTER_TOP + SCATTER_BELOW,
      marginLeft: SCATTER_LEFT, marginRight: 0, marginTop: SCATTER_TOP, marginBottom: SCATTER_BELOW,
      x: scale, y: scale,
      marks: [
        Plot.line(corners, { className: "band", clip: true }),
        Plot.gridY(values, { className: "rules" }),
        Plot.text(values, { className: "ticks", y: (value) => value, frameAnchor: "left", textAnchor: "end", dx: -8, text: spell }),
        Plot.axisX(values, { className: "ticks", tickFormat: spell, tickSize: 4, tickPadding: 6, label: null }),
        Plot.ruleY([low], { className: "stroke" }),
        Plot.line([[low, low], [high, high]], { className: "diagonal" }),
        Plot.text([name[1]], { className: "ticks", frameAnchor: "top-left", textAnchor: "start", dx: -SCATTER_LEFT, dy: -20 }),
        Plot.text([name[0]], { className: "ticks", frameAnchor: "bottom-right", textAnchor: "end", dy: 38 }),
        Plot.ruleX(points, { className: "lead", x: "x", y1: "first", y2: "y", stroke: shade }),
        Plot.dot(points, { className: "ring", x: "x", y: "first", r: 4.5, stroke: shade }),
        Plot.dot(points, { className: "mark", x: "x", y: "y", r: 6, fill: shade, stroke: null }),
        Plot.text(labels, { className: "label", x: "x", y: "y", dx: 0, text: "words", textAnchor: "start", lineAnchor: "bottom" }),
      ],
    });
    this.place(drawing);
    this.points = new Map([...drawing.querySelectorAll(".mark > circle")].map((dot) => [dot, points[dot.__data__]]));
  }

  /** Draw the labels of points where there is room: right, left, above, below. */
  #labels(points, width, low, high) {
    const side = width - SCATTER_LEFT;
    const share = (value) => Math.log(value / low) / Math.log(high / low);
    const [x, y] = [(value) => share(value) * side, (value) => (1 - share(value)) * side];
    const value = (part) => low * (high / low) ** part;
    const around = (px, py) => [px - 7, py - 7, px + 7, py + 7];
    const taken = points.flatMap((point) => [around(x(point.x), y(point.y)), around(x(point.x), y(point.first))]);
    const meet = (a, b) => a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3];
    return points.flatMap((point) => {
      const wide = textWidth(point.words);
      const [px, py] = [x(point.x), y(point.y)];
      const choices = [[12, 5], [-12 - wide, 5], [-wide / 2, -13], [-wide / 2, 23], [12, 21], [-12 - wide, -11]];
      for (const [dx, dy] of choices) {
        const [left, base] = [px + dx, py + dy];
        const box = [left, base - 11, left + wide, base + 3];
        if (left > 0 && box[2] < side && box[1] > 0 && !taken.some((one) => meet(box, one))) {
          taken.push(box);
          return [{ x: value(left / side), y: value(1 - (base + 3) / side), words: point.words }];
        }
      }
      return [];
    });
  }
}

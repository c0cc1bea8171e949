// A chart of one or two curves over time, under a caption that names them.

import { Curves, spelt, split, valuesOf } from "./curves.js";
import { h, say } from "./dom.js";

const HEIGHT = 150;

export class Chart {
  /**
   * @param title of the chart
   * @param unit of its values, as "samples/s"
   * @param lines [{ name, style }]; style: "" (the first), "second", "step"
   * @param options.zero whether the axis begins at 0; options.kind: format of the values;
   * options.smooth: draw a smoothed curve if there are many values
   */
  constructor(title, unit, lines, { zero = true, kind = "number", smooth = false } = {}) {
    this.panel = { name: title, unit, kind, height: HEIGHT, zero, smooth, lines: lines.map((line) => ({ ...line, pieces: [] })) };
    this.curves = new Curves({ x: { kind: "moment", low: 0, high: 1 }, panels: [this.panel], bands: [], marks: [] });
    this.last = h("b");
    this.element = h("figure", { class: "curve" },
      h("figcaption", {}, h("span", { class: "what" }, title, unit ? h("i", {}, ` ${unit}`) : null), this.last, this.curves.legend),
      this.curves.canvas);
  }

  /**
   * @param series for each line its [[time, value], …], without unknown values
   * @param from, to: the span of time; marks: [{ at, label }] of restarts
   */
  update(series, { from, to, marks }) {
    const lines = this.panel.lines.map((line, i) => ({ ...line, pieces: split(series[i], marks) }));
    this.empty = series.every((one) => one.length === 0);
    const newest = valuesOf(lines[0]).at(-1);
    say(this.last, newest === undefined ? "" : spelt(this.panel, newest));
    this.curves.update({ x: { kind: "moment", low: from, high: Math.max(to, from + 1) }, panels: [{ ...this.panel, lines }], bands: [], marks });
  }
}

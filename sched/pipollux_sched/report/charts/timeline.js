// Timelines: groups of rows over time, such as the slots of nodes or the stages of a pipeline.

import { SPELL, xTicks } from "./axes.js";
import { h } from "./dom.js";
import { Figure, textWidth } from "./figure.js";

const EDGE = 16; // right of the last moment
const AXIS = 28;
const LANE = 18; // height of a row of flags
const MOST_NAMED = 16; // flags with labels over the chart; with more, labels appear under the pointer
const LINE = 13; // height of a label
const NARROW = 560; // below this width, names that would be cut stand above their rows
const NAME = 20; // height of such a name
const THIN = 8; // rows below this height are merged within their group

/**
 * @param spec {
 *   title, x: { kind, name, low, high }, row, gap, now, flags: [{ at, words, colour }],
 *   groups: [{ name, note, title, labels, rows, state, until, ending: [words, rest] }],
 *   blocks: [{ group, row, rows, start, begin, end, to, colour, style, words: [long, short], tip }],
 *   tips: [[line or [label, value], …]] }
 * A block is hatched `start` … `to`, and solid `begin` … `end`; `row` and `gap` are heights, `until` how
 * far a group's rows go, `style` one of "", "open" (it goes on), "failed", "forward" and "backward".
 */
export class Timeline extends Figure {
  constructor(spec, { open = null } = {}) {
    super("gantt");
    this.goTo = open;
    this.element = h("div", { class: "timeline" }, this.canvas);
    this.update(spec);
  }

  update(spec) {
    this.spec = spec;
    if (this.selected) this.selected = spec?.blocks.find((block) => block.key === this.selected.key && block.key !== undefined) ?? null;
    if (spec) this.plot.setAttribute("aria-label", `${spec.title}; arrow keys read it`);
    this.draw();
  }

  whole() {
    const { low, high } = this.spec.x;
    return [low, high > low ? high : low + 1];
  }

  draw() {
    if (!this.width || !this.spec) return;
    const { groups, x, row, gap } = this.spec;
    const labelled = (group) => Math.max(0, ...(group.labels ?? []).map((label) => textWidth(label, 12.5) + 12));
    const numbers = Math.max(0, ...groups.map(labelled));
    const widest = Math.max(0, ...groups.map((group) => Math.max(textWidth(group.name, 13, 600), textWidth(group.note ?? "", 12.5)) + labelled(group)));
    const most = Math.min(Math.max(this.width * 0.26, 70), 190);
    this.above = this.spec.left == null && this.width < NARROW && widest + 14 > most; // names stand above their rows
    this.left = this.spec.left ?? (this.above ? numbers + 2 : Math.min(widest + 14, most));
    this.right = this.spec.right ?? EDGE;
    let height = 0;
    this.tops = groups.map((group) => {
      height += (group.title ? 22 : 0) + (this.above ? NAME : 0);
      const top = height;
      height += group.rows * row + gap;
      return top;
    });
    const [from, to] = this.domain;
    const place = (time) => this.left + ((time - from) / (to - from)) * (this.width - this.left - this.right);
    const flags = this.#flags(place, from, to);
    const top = flags.height + 6;
    const ticks = xTicks(x.kind, from, to, Math.floor((this.width - this.left) / 90));
    const labels = new Map(ticks.map((one) => [one.value, one.label]));
    const options = { className: "ticks", tickFormat: (value) => labels.get(value), tickSize: 4, tickPadding: 6, label: null };
    const drawing = Plot.plot({
      className: "drawing",
      width: this.width, height: top + height + AXIS,
      marginLeft: this.left, marginRight: this.right, marginTop: top, marginBottom: AXIS,
      x: { domain: [from, to], axis: null },
      y: { domain: [height, 0], axis: null },
      marks: [
        ...this.#rows(),
        ...this.#blocks(place, from, to),
        Plot.ruleY([height], { className: "stroke" }),
        Plot.axisX(ticks.map((one) => one.value), options),
        x.name ? Plot.text([x.name], { className: "ticks", frameAnchor: "bottom-left", textAnchor: "end", dx: -10, dy: 20 }) : null,
        ...flags.marks,
        ...this.#now(from, to, height),
      ],
    });
    this.place(drawing);
    this.rects = [...drawing.querySelectorAll(".block > rect")];
    this.indices = new Map(this.rects.map((rect) => [rect, this.shown[rect.__data__]]));
    this.mark(this.selected);
  }

  // Reading with pointer and keys

  things() {
    return this.shown ?? [];
  }

  at(block) {
    const [from, to] = this.domain;
    return (Math.max(block.start, from) + Math.min(block.to, to)) / 2;
  }

  under(event) {
    return this.indices?.get(document.elementFromPoint(event.clientX, event.clientY)) ?? null;
  }

  tell(block) {
    return Array.isArray(block.tip) ? block.tip : this.spec.tips[block.tip];
  }

  mark(block) {
    for (const [rect, one] of this.indices ?? []) rect.classList.toggle("chosen", one === block);
  }

  open(block) {
    this.goTo?.(block);
  }

  // Drawing

  #rows() {
    const { groups, row } = this.spec;
    const rows = groups.flatMap((group, i) => row < THIN
      ? [{ group, top: this.tops[i], height: group.rows * row }]
      : Array.from({ length: group.rows }, (_, slot) => ({ group, slot, top: this.tops[i] + slot * row, height: row - 2 })));
    const [from, to] = this.domain;
    const until = (group) => Math.max(from, Math.min(group.until ?? to, to));
    const middle = (group, i) => this.tops[i] + (group.rows * row) / 2;
    const { above } = this;
    const room = above ? this.width : this.left - 14;
    const cut = (group) => shortened(group.name, room - (group.labels && !above ? 20 : 0));
    const named = (group, i) => (above ? this.tops[i] - 9 : middle(group, i) - (group.note ? 7 : 0));
    const label = { frameAnchor: "left", textAnchor: "start", dx: -this.left };
    const numbered = row >= 18 ? rows.filter(({ group }) => group.labels) : [];
    const ended = groups.flatMap((group, i) => (group.ending ? [{ group, i }] : []));
    return [
      Plot.rect(rows, { className: "free", x1: from, x2: ({ group }) => until(group), y1: "top", y2: (one) => one.top + one.height, rx: 2, clip: true }),
      ...["ready", "draining", "dead"].map((state) => Plot.text(groups.map((group, i) => ({ group, i })).filter(({ group }) => (group.state ?? "ready") === state), {
        ...label, className: `node ${state}`, y: ({ group, i }) => named(group, i), text: ({ group }) => cut(group), title: ({ group }) => (group.state || cut(group) !== group.name ? `${group.name}${group.state ? `: ${group.state}` : ""}` : null) })),
      ...groups.map((group, i) => ({ group, i })).filter(({ group }) => group.note).map((one) => Plot.text([one], {
        ...label, className: "ticks", dx: label.dx + (above ? textWidth(cut(one.group), 13, 600) + 10 : 0), y: ({ group, i }) => (above ? named(group, i) : middle(group, i) + 9),
        text: ({ group }) => shortened(group.note, above ? room - textWidth(cut(group), 13, 600) - 10 : room, 12.5) })),
      Plot.text(numbered, { frameAnchor: "left", textAnchor: "end", dx: -10, className: this.spec.seams ? "faint" : "label", y: (one) => one.top + one.height / 2, text: ({ group, slot }) => group.labels[slot] }),
      Plot.text(groups.map((group, i) => ({ group, i })).filter(({ group }) => group.title), { frameAnchor: "left", textAnchor: "start", dx: 0, className: "strong", y: ({ i }) => this.tops[i] - 11, text: ({ group }) => group.title }),
      Plot.ruleX(ended, { className: "stroke", x: ({ group }) => group.until, y1: ({ i }) => this.tops[i] - 4, y2: ({ group, i }) => this.tops[i] + group.rows * row + 2, clip: true }),
      ...[[0, "strong", -8], [1, "ticks", 8]].map(([part, className, dy]) => Plot.text(ended.filter(({ group }) => group.until <= to), {
        className, x: ({ group }) => group.until, y: ({ group, i }) => middle(group, i), text: ({ group }) => group.ending[part], textAnchor: "start", dx: 10, dy })),
    ];
  }

  #blocks(place, from, to) {
    const { row } = this.spec;
    this.shown = this.spec.blocks.filter((block) => block.to >= from && block.start <= to);
    const y1 = (block) => this.tops[block.group] + block.row * row;
    const y2 = (block) => y1(block) + block.rows * row - (row < THIN ? 0.6 : 2);
    const shade = (block) => `var(--job-${block.colour % 8})`;
    const rects = (blocks, className, x1, x2, options) =>
      Plot.rect(blocks, { className, x1, x2, y1, y2, rx: row < THIN ? 0 : 2, clip: true, ...options });
    const solid = this.shown.filter((block) => block.end > block.begin);
    const paused = this.shown.filter((block) => block.start < block.begin || block.end < block.to);
    const least = ((to - from) / Math.max(this.width - this.left, 1)) * 2; // so wide that it is seen
    const wide = (block) => Math.max(block.to, block.start + least);
    return [
      rects(paused, "pause", "start", wide, { fill: (block) => `url(#hatch-${block.colour % 8})` }),
      ...["", "forward", "backward"].map((style) => rects(solid.filter((block) => (isStage(block) ? block.style : "") === style),
        `train ${style}`, "begin", (block) => Math.max(block.end, Math.min(block.begin + least, block.to)), { fill: shade })),
      rects(this.shown.filter((block) => block.style === "failed"), "broken", (block) => block.to - least * 1.5, wide, { rx: 0 }),
      rects(this.shown.filter((block) => block.style !== "open"), "block", "start", wide, { stroke: (block) => (row < THIN || isStage(block) ? "none" : shade(block)) }),
      rects(this.shown.filter((block) => block.style === "open"), "block open", "start", wide, { stroke: shade }),
      ...this.#words(solid, place, from, to, y1, y2),
    ];
  }

  /** Label blocks where the text fits. */
  #words(blocks, place, from, to, y1, y2) {
    const high = blocks.filter((block) => y2(block) - y1(block) >= LINE);
    const written = high.flatMap((block) => {
      const [left, right] = [place(Math.max(block.begin, from)), place(Math.min(block.end, to))];
      const centred = isStage(block);
      const text = block.words.find((words) => textWidth(words) <= right - left - (centred ? 3 : 14));
      return text ? [{ block, text, x: centred ? (left + right) / 2 : left + 9, centred, end: left + 18 + textWidth(text) }] : [];
    });
    const seams = !this.spec.seams ? [] : written.flatMap(({ block, end }) =>
      Array.from({ length: block.rows - 1 }, (_, stage) => ({ x: this.#time(end, from, to), end: block.end, y: y1(block) + (stage + 1) * this.spec.row - 1 })).filter((seam) => seam.x < seam.end));
    const drawn = [Plot.ruleY(seams, { className: "seam", x1: "x", x2: "end", y: "y", clip: true })];
    return drawn.concat([["on-block", (one) => one.block.style !== "backward"], ["label", (one) => one.block.style === "backward"]].flatMap(([className, ours]) =>
      ["start", "middle"].map((textAnchor) => Plot.text(written.filter((one) => ours(one) && one.centred === (textAnchor === "middle")), {
        className, textAnchor, frameAnchor: "left", dx: 0, x: (one) => this.#time(one.x, from, to), y: ({ block }) => (y1(block) + y2(block)) / 2, text: "text" }))));
  }

  #time(x, from, to) {
    return from + ((x - this.left) / (this.width - this.left - this.right)) * (to - from);
  }

  /** Draw the events as flags over the chart: no label crosses another, or another flag's pole. */
  #flags(place, from, to) {
    const flags = (this.spec.flags ?? []).filter((flag) => flag.at >= from && flag.at <= to);
    if (!flags.length) return { marks: [], height: 4 };
    const named = flags.length <= MOST_NAMED;
    const found = lanes(flags.map((flag) => [place(flag.at), named ? textWidth(flag.words, 12.5) + 20 : 0]), this.width);
    const rows = 1 + Math.max(...found.map(([lane]) => lane));
    const all = flags.map((flag, i) => ({ ...flag, up: -14 - LANE * found[i][0], flipped: found[i][1] }));
    const shade = (flag) => `var(--job-${flag.colour % 8})`;
    const bottom = this.tops.at(-1) + this.spec.groups.at(-1).rows * this.spec.row;
    return {
      height: rows * LANE + 6,
      marks: [
        Plot.ruleX(all, { className: "pole", x: "at", y1: "up", y2: bottom, stroke: shade }),
        Plot.dot(all, { className: "flag-dots", x: "at", y: "up", r: 3.2, fill: shade, stroke: null, title: (flag) => `${flag.words} at ${SPELL[this.spec.x.kind].value(flag.at)}` }),
        ...(named ? [false, true].map((flipped) => Plot.text(all.filter((flag) => flag.flipped === flipped), {
          className: "flags", x: "at", y: "up", text: "words", textAnchor: flipped ? "end" : "start", dx: flipped ? -9 : 9 })) : []),
      ],
    };
  }

  #now(from, to, height) {
    const { now } = this.spec;
    if (now === undefined || now < from || now > to) return [];
    return [Plot.ruleX([now], { className: "now" }), Plot.dot([[now, height]], { x: "0", y: "1", r: 3.5, className: "now-dot" })];
  }
}

/** Whether a block is a micro-batch in a stage. */
const isStage = (block) => block.style === "forward" || block.style === "backward";

/** Return a text, cut to a width. */
function shortened(words, room, size = 13) {
  if (textWidth(words, size, 600) <= room) return words;
  let end = words.length - 1;
  while (end > 1 && textWidth(`${words.slice(0, end)}…`, size, 600) > room) end -= 1;
  return `${words.slice(0, end)}…`;
}

/**
 * Place flags [x, width of its label] over a chart so that nothing crosses labels: [[lane, flipped], …],
 * where lane 0 is next to the chart. Each flag's pole runs down from its lane, so labels lie above
 * every pole they cover. Labels that would pass `right`, or cover the pole of such a flag, are put to
 * the left of their pole.
 */
export function lanes(places, right) {
  const order = places.map((_, i) => i).sort((a, b) => places[b][0] - places[a][0]);
  const extents = new Map();
  const flipped = new Map();
  let limit = right;
  for (const i of order) {
    const [x, width] = places[i];
    flipped.set(i, x + width > limit);
    extents.set(i, flipped.get(i) ? [x - width, x] : [x, x + width]);
    if (flipped.get(i)) limit = Math.min(limit, x);
  }
  const lane = new Map();
  const flips = [...order].reverse().filter((i) => flipped.get(i));
  for (const i of [...order.filter((one) => !flipped.get(one)), ...flips]) {
    const [low, high] = extents.get(i);
    const below = [...lane].filter(([j]) => {
      const [x] = places[j];
      const [first, last] = extents.get(j);
      return (low < x && x < high) || (first < high && low < last);
    });
    lane.set(i, 1 + Math.max(-1, ...below.map(([, one]) => one)));
  }
  return places.map((_, i) => [lane.get(i), flipped.get(i)]);
}

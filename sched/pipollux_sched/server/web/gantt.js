// Who held which slot when: a row for each slot of each node, a block for each replica.

import { timeTicks } from "./axes.js";
import { colour, h, s } from "./dom.js";
import { count, duration, moment, places } from "./format.js";
import { Hover, onWidth } from "./hover.js";
import { hasFailed, outcome } from "./words.js";

const AXIS = 24;
const GAP = 6; // between nodes
const EDGE = 26; // right of now
const LETTER = 7.2;

/** The picture; a click on a block, or Enter, opens its job. */
export class Gantt {
  constructor() {
    this.hover = new Hover();
    this.svg = s("svg", { class: "plot gantt", tabindex: 0, role: "img" });
    this.canvas = h("div", { class: "canvas" }, this.svg, this.hover.element);
    this.element = h("div", { class: "scroll" }, this.canvas);
    this.width = 0;
    this.view = null;
    this.selected = null;
    onWidth(this.canvas, (width) => {
      this.width = width;
      this.draw();
    });
    this.svg.addEventListener("pointermove", (event) => this.#select(event.target.dataset?.key ?? null, event));
    this.svg.addEventListener("pointerleave", () => this.#select(null));
    this.svg.addEventListener("blur", () => this.#select(null));
    this.svg.addEventListener("click", () => this.#open());
    this.svg.addEventListener("keydown", (event) => this.#key(event));
  }

  /** @param view { nodes: {name: {slots, condition}}, generations, from, to, now } */
  update(view) {
    this.view = view;
    this.draw();
  }

  draw() {
    if (!this.width || !this.view) return;
    const { nodes, generations, from, to } = this.view;
    const names = Object.keys(nodes);
    const slots = names.reduce((sum, name) => sum + nodes[name].slots, 0);
    const row = Math.max(4, Math.min(22, Math.floor(460 / Math.max(slots, 1))));
    const longest = Math.max(...names.map((name) => name.length), 4);
    const left = Math.min(longest * LETTER + 14, this.width * 0.24, 170);
    const tops = new Map();
    let height = 4;
    for (const name of names) {
      tops.set(name, height);
      height += nodes[name].slots * row + GAP;
    }
    this.x = (time) => left + ((time - from) / (to - from)) * (this.width - left - EDGE);
    this.blocks = layOut(generations, nodes);
    this.svg.setAttribute("width", this.width);
    this.svg.setAttribute("height", height + AXIS);
    this.svg.setAttribute("aria-label", this.#describe(slots));
    const shape = { row, left, height, tops };
    this.svg.replaceChildren(
      hatches(),
      ...names.flatMap((name) => this.#node(name, shape)),
      ...this.#axis(shape),
      ...this.blocks.map((block) => this.#block(block, shape)),
      ...this.#edge(shape),
    );
  }

  #describe(slots) {
    const now = this.blocks.filter((block) => block.generation.ended_at === null);
    const jobs = new Set(now.map((block) => block.generation.job));
    return `Who held which of ${count(slots, "slot")} when: ${count(jobs.size, "job")} now; arrow keys read it`;
  }

  #node(name, { row, left, tops }) {
    const { slots, condition } = this.view.nodes[name];
    const top = tops.get(name);
    const room = Math.floor((left - 14) / LETTER);
    const short = name.length > room ? `${name.slice(0, Math.max(room - 1, 1))}…` : name;
    const rows = Array.from({ length: slots }, (_, slot) =>
      s("rect", { class: "free", x: left, y: top + slot * row, width: this.width - left - EDGE, height: row - 1 }));
    const label = s("text", { class: `node ${condition}`, x: 0, y: top + (slots * row) / 2 + 4 }, short, s("title", {}, `${name}: ${condition}`));
    return [...rows, label];
  }

  #axis({ left, height }) {
    const wanted = Math.floor((this.width - left) / 90);
    return timeTicks(this.view.from, this.view.to, wanted).flatMap(({ value, label }) => {
      const x = this.x(value);
      const half = (label.length * LETTER) / 2;
      const middle = Math.max(left + half - 8, Math.min(x, this.width - half));
      return [
        s("line", { class: "rule", x1: x, x2: x, y1: 0, y2: height }),
        s("text", { class: "tick", x: middle, y: height + 16, "text-anchor": "middle" }, label),
      ];
    });
  }

  #block(block, { row, tops }) {
    const { generation } = block;
    const { from, now } = this.view;
    const y = tops.get(block.node) + block.slot * row;
    const height = block.slots * row - 1;
    const end = generation.ended_at ?? now;
    const at = (time) => this.x(Math.max(Math.min(time, end), from));
    const trained = generation.first_step_at ?? end;
    const stopping = Math.max(generation.stopping_at ?? end, trained);
    const [x0, x1, x2, x3] = [block.begin, Math.max(trained, block.begin), stopping, end].map(at);
    const group = s("g", { class: `block ${colour(block.number)}${block.key === this.selected ? " chosen" : ""}` });
    const part = (kind, a, b) => {
      if (b - a > 0.2) group.append(s("rect", { class: kind, x: a, y, width: b - a, height, "data-key": block.key }));
    };
    part("pause", x0, x1);
    part("train", x1, x2);
    part("pause", x2, x3);
    for (const piece of group.querySelectorAll(".pause")) piece.setAttribute("fill", `url(#hatch-${(block.number - 1) % 8})`);
    if (x3 - x0 <= 2) part("train", x0, Math.max(x3, x0 + 2));
    if (hasFailed(generation)) group.append(s("rect", { class: "broken", x: x3 - 1.5, y, width: 3, height }));
    const room = Math.floor((x2 - x1 - 12) / LETTER);
    if (height >= 13 && room >= 3) {
      const { job } = generation;
      const text = job.length > room ? `${job.slice(0, room - 1)}…` : job;
      group.append(s("text", { class: "on-block", x: x1 + 6, y: y + height / 2 + 4.5 }, text));
    }
    return group;
  }

  #edge({ height }) {
    const x = this.x(this.view.now);
    return [
      s("line", { class: "now", x1: x, x2: x, y1: 0, y2: height }),
      s("circle", { class: "now-dot", cx: x, cy: height, r: 3.5 }),
    ];
  }

  // What is pointed at

  #select(key, event = null) {
    if (key !== this.selected) {
      this.selected = key;
      this.draw();
    }
    const block = this.blocks?.find((one) => one.key === key);
    if (!block) return this.hover.hide();
    const { generation } = block;
    const end = generation.ended_at ?? this.view.now;
    const x = event ? event.offsetX : this.x(Math.max((Math.max(generation.created_at, this.view.from) + end) / 2, 0));
    const y = event ? event.offsetY + 16 : 8;
    return this.hover.show(x, y, [
      `${generation.job} · generation ${generation.generation}`,
      ["where", places(generation.nodes)],
      ["replicas × stages", `${generation.nodes.length} × ${generation.num_stages}`],
      ["from", moment(generation.created_at)],
      ["for", duration(end - generation.created_at)],
      ["", state(generation)],
    ]);
  }

  #key(event) {
    const blocks = this.blocks ?? [];
    if (event.key === "Escape") return this.#select(null);
    if (event.key === "Enter") return this.#open();
    const at = blocks.findIndex((block) => block.key === this.selected);
    const now = at < 0 ? blocks.length : at;
    const to = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: blocks.length - 1 }[event.key];
    if (to === undefined || !blocks.length) return undefined;
    event.preventDefault();
    return this.#select(blocks[Math.max(0, Math.min(to, blocks.length - 1))].key);
  }

  #open() {
    const block = this.blocks?.find((one) => one.key === this.selected);
    if (block) location.hash = `#/jobs/${encodeURIComponent(block.generation.job)}`;
  }
}

function state(generation) {
  if (generation.ended_at !== null) return `ended: ${outcome(generation) ?? "not known how"}`;
  if (generation.stopping_at !== null) return "is being stopped";
  return generation.first_step_at === null ? "starts" : "trains";
}

/**
 * Give every replica slots of its node, the lowest that are free, oldest generation first. Which of a
 * node's slots a replica is drawn in is a matter of layout: the scheduler tells nodes, not slots.
 */
export function layOut(generations, nodes) {
  const taken = new Map(Object.entries(nodes).map(([name, node]) => [name, Array(node.slots).fill(-Infinity)]));
  const blocks = [];
  const ordered = [...generations].sort((a, b) => a.created_at - b.created_at);
  for (const generation of ordered) {
    generation.nodes.forEach((node, replica) => {
      const ends = taken.get(node);
      if (!ends) return; // the node is gone
      const order = ends.map((end, slot) => [end > generation.created_at ? end : -Infinity, slot]);
      order.sort((a, b) => (a[0] === b[0] ? a[1] - b[1] : a[0] - b[0]));
      const chosen = order.slice(0, generation.num_stages).map(([, slot]) => slot).sort((a, b) => a - b);
      // It may have been decided on while those before it still save: it holds them from then on.
      const left = chosen.map((slot) => ends[slot]).filter((end) => end < (generation.ended_at ?? Infinity));
      const begin = Math.max(generation.created_at, ...left);
      for (const slot of chosen) ends[slot] = generation.ended_at ?? Infinity;
      for (const [slot, slots] of runs(chosen)) {
        const key = `${generation.job} ${generation.generation} ${replica} ${slot}`;
        blocks.push({ key, generation, node, slot, slots, begin, number: generation.number });
      }
    });
  }
  return blocks;
}

/** Neighbouring slots together: [[first, how many], …]. */
function runs(slots) {
  const found = [];
  for (const slot of slots) {
    const last = found.at(-1);
    if (last && last[0] + last[1] === slot) last[1] += 1;
    else found.push([slot, 1]);
  }
  return found;
}

function hatches() {
  return s("defs", {}, Array.from({ length: 8 }, (_, number) =>
    s("pattern", { id: `hatch-${number}`, class: colour(number + 1), width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      s("rect", { class: "hatch-ground", width: 6, height: 6 }),
      s("rect", { class: "hatch-line", width: 1.6, height: 6 }))));
}

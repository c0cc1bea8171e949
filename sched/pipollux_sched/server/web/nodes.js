// The nodes: a row each with its slot usage, which opens to show the jobs on its slots.

import { actionButton } from "./actions.js";
import { quietly } from "./api.js";
import { h, s, say } from "./dom.js";
import { count, moment } from "./format.js";
import { Gantt } from "./gantt.js";
import { deviceLine, jobLink, phaseMark } from "./words.js";

const SPANS = { "2 min": 120, "5 min": 300, "15 min": 900, "1 h": 3600, "3 h": 10800, "12 h": 43200, "1 d": 86400, "7 d": 604800 };
const PARTS = 120;
const SELDOM_MS = 2000;
const LEGEND = [
  ["share", "bar: share of the slots in use"],
  ["solid", "a replica trains"],
  ["hatched", "it starts or stops"],
  ["ended", "it failed"],
  ["empty", "free"],
];
const FEW_SLOTS = 24; // up to this number, every node is open until it is closed
const MOST_NAMED = 100; // for more open nodes, attempts are requested without naming nodes

export class Nodes {
  constructor(live) {
    this.live = live;
    this.span = null; // the chosen one; null: the span of all running jobs' attempts
    this.rows = new Map();
    this.opened = live.opened ??= new Map(); // whether each is open, by name; kept across views
    this.usage = null;
    this.attempts = [];
    this.list = h("div", { class: "nodes-list" });
    this.about = h("span", { class: "about" });
    this.from = h("span");
    this.element = h("section", { class: "nodes" }, h("h2", {}, "Nodes"), this.about, this.#spans(), this.list,
      h("p", { class: "time" }, this.from, h("span", {}, "now")),
      h("p", { class: "legend" }, ...LEGEND.map(([kind, words]) => h("span", {}, h("i", { class: kind }), words))));
  }

  update() {
    const { nodes } = this.live.data;
    const names = Object.keys(nodes);
    const slots = names.reduce((sum, name) => sum + nodes[name].slots, 0);
    this.few = slots <= FEW_SLOTS;
    for (const name of names) if (!this.rows.has(name)) this.rows.set(name, this.#row(name));
    for (const [name, row] of this.rows) if (!nodes[name]) this.#remove(name, row);
    if (this.list.children.length !== names.length) this.list.replaceChildren(...names.map((name) => this.rows.get(name).element));
    const away = names.filter((name) => nodes[name].condition !== "ready").length;
    const out = names.reduce((sum, name) => sum + nodes[name].devices.filter((one) => one.problem).length, 0);
    say(this.about, `${count(names.length, "node")}${away ? `, ${away} not ready` : ""}${out ? `, ${count(out, "GPU")} left out` : ""}`);
    for (const [name, row] of this.rows) this.#tell(name, row, nodes[name]);
    this.#askUsage();
    this.#askAttempts();
    this.draw();
  }

  /** Draw what changes with time. */
  draw() {
    const { data, now } = this.live;
    if (!data) return;
    const to = this.live.awaySince ?? now;
    const from = to - this.#seconds(to);
    say(this.from, moment(from));
    for (const button of this.buttons) button.setAttribute("aria-pressed", String(button.span === this.span));
    for (const [name, row] of this.rows) {
      this.#stretch(row, from, to);
      row.gantt?.update({ nodes: { [name]: data.nodes[name] }, attempts: this.#on(name), from, to, now: to, ...this.#margins(row) });
    }
  }

  /** Align a node's usage with the span of its slots; the last known usage extends to now. */
  #stretch({ strip }, from, to) {
    if (!this.measured) return;
    const { since, until } = this.measured;
    const part = (time) => ((time - since) / (until - since)) * PARTS;
    const window = `${part(from).toFixed(3)} 0 ${(part(to) - part(from)).toFixed(3)} 1`;
    if (strip.getAttribute("viewBox") !== window) strip.setAttribute("viewBox", window);
  }

  /** Return the margins that align a node's slots with its usage in time. */
  #margins({ strip, gantt }) {
    if (!gantt) return {};
    const [bar, box] = [strip.getBoundingClientRect(), gantt.element.getBoundingClientRect()];
    return { left: Math.max(bar.left - box.left, 0), right: Math.max(box.right - bar.right, 0) };
  }

  #seconds(now) {
    const oldest = this.live.data.oldest_attempt ?? now;
    return this.span ?? Math.min(Math.max((now - oldest) * 1.04, SPANS["2 min"] / 2), SPANS["1 d"]);
  }

  #spans() {
    const choose = (span) => () => {
      this.span = span;
      this.asked = 0;
      this.update();
    };
    this.buttons = [["all", null], ...Object.entries(SPANS)].map(([title, span]) =>
      Object.assign(h("button", { type: "button", click: choose(span) }, title), { span }));
    return h("div", { class: "choice spans", role: "group", "aria-label": "Span of time" }, ...this.buttons);
  }

  #row(name) {
    const path = s("path");
    const strip = s("svg", { class: "strip", viewBox: `0 0 ${PARTS} 1`, preserveAspectRatio: "none", role: "img" }, path);
    const row = { path, strip, used: h("span", { class: "used" }), mark: h("span"), body: h("div", { class: "node-body" }), gantt: null };
    const open = this.opened.get(name) ?? this.few;
    row.element = h("details", { class: "node", open, toggle: () => this.#toggle(name, row) },
      h("summary", {}, h("span", { class: "name" }, name), strip, row.used, row.mark), row.body);
    if (open) this.#open(row);
    return row;
  }

  #remove(name, row) {
    row.element.remove();
    this.rows.delete(name);
  }

  #toggle(name, row) {
    const { open } = row.element;
    if (open === Boolean(row.gantt)) return;
    this.opened.set(name, open);
    if (open) this.#open(row);
    else this.#close(row);
    this.update();
  }

  #open(row) {
    row.gantt = new Gantt();
    row.holders = h("p", { class: "holders" });
    row.actions = h("p", { class: "node-actions" });
    row.devices = h("ul", { class: "devices", "aria-label": "GPUs" });
    row.body.replaceChildren(row.gantt.element, row.holders, row.devices, row.actions);
  }

  #close(row) {
    row.gantt = null;
    row.body.replaceChildren();
  }

  #tell(name, row, node) {
    say(row.used, `${node.used} of ${node.slots}`);
    if (row.told !== node.condition) row.mark.replaceChildren(...(node.condition === "ready" ? [] : [phaseMark(node.condition)]));
    row.told = node.condition;
    const label = `${name}: ${node.used} of ${count(node.slots, "slot")} in use by ${count(Object.keys(node.jobs).length, "job")}`;
    if (row.label !== label) row.strip.setAttribute("aria-label", label);
    row.label = label;
    if (row.gantt) this.#tellMore(name, row, node);
  }

  #tellMore(name, row, node) {
    const since = node.reason || node.condition !== "ready" ? `${node.condition}${node.reason ? `: ${node.reason}` : ""} (since ${moment(node.since)})` : "";
    const told = `${node.condition}${since}${this.live.isAdmin}`;
    if (row.actions.told !== told) {
      const kind = node.condition === "ready" ? "drain" : "undrain";
      const buttons = this.live.isAdmin ? [actionButton(kind, name, () => this.live.refresh())] : [];
      row.actions.replaceChildren(...buttons, h("span", { class: "reason" }, since));
    }
    row.actions.told = told;
    const holds = Object.keys(node.jobs).map((job) => [job, this.live.numbers.get(job)]);
    const text = holds.join();
    if (row.holders.told !== text) row.holders.replaceChildren(...holds.map((held) => jobLink(...held)));
    row.holders.told = text;
    this.#tellDevices(row, node.devices);
  }

  /** List the GPUs of a node, where their state is known. */
  #tellDevices(row, devices) {
    const text = JSON.stringify(devices);
    if (row.devices.told === text) return;
    row.devices.told = text;
    row.devices.replaceChildren(...devices.map((one) => h("li", { class: one.problem ? "left-out" : "" }, deviceLine(one))));
  }

  #on(name) {
    return this.attempts.filter((attempt) => attempt.nodes.includes(name));
  }

  // Further requests

  async #askUsage() {
    const seconds = this.#seconds(this.live.now);
    const pause = Math.max(SELDOM_MS, (seconds * 1000) / PARTS);
    if (performance.now() - (this.asked || -Infinity) < pause || this.live.awaySince !== null) return;
    this.asked = performance.now();
    const found = await quietly(`/usage?since=${(this.live.now - seconds).toFixed(1)}&parts=${PARTS}`);
    if (!found) return;
    this.measured = found;
    this.#drawUsage(found.nodes);
    this.draw();
  }

  #drawUsage(usage) {
    for (const [name, row] of this.rows) {
      const slots = this.live.data.nodes[name]?.slots || 1;
      const shape = steps((usage[name] ?? []).map((held) => Math.min(held / slots, 1)));
      if (row.shape !== shape) row.path.setAttribute("d", shape);
      row.shape = shape;
    }
  }

  async #askAttempts() {
    const open = [...this.rows].filter(([, row]) => row.gantt).map(([name]) => name);
    if (!open.length || this.asking || this.live.awaySince !== null) return;
    this.asking = true;
    const since = (this.live.now - this.#seconds(this.live.now)).toFixed(0);
    const named = open.length > MOST_NAMED ? [] : open.map((name) => ["node", name]);
    const found = await quietly(`/attempts?${new URLSearchParams([["since", since], ...named])}`);
    this.asking = false;
    if (!found) return;
    this.attempts = found;
    this.live.note(found.map((attempt) => [attempt.job, attempt.number]));
    for (const [name, row] of this.rows) if (row.gantt && this.live.data.nodes[name]) this.#tellMore(name, row, this.live.data.nodes[name]);
    this.draw();
  }
}

/** Return the outline of adjacent bars, each a share of the height. */
function steps(shares) {
  if (!shares.length) return "";
  const end = (i) => (i === shares.length - 1 ? 2 * PARTS : i + 1); // until the next request
  const line = shares.map((share, i) => `V${(1 - share).toFixed(3)}H${end(i)}`).join("");
  return `M0 1${line}V1Z`;
}

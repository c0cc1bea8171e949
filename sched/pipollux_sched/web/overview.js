// The cluster at a glance: who holds what, figures, jobs, nodes, events.

import { actionButton } from "./actions.js";
import { colour, h } from "./dom.js";
import { DASH, duration, epochs, moment, number, places } from "./format.js";
import { Gantt } from "./gantt.js";
import { Table } from "./table.js";
import { ORDER, Tiles, fillPlaces, jobLink, phase, phaseMark, section } from "./words.js";

const MOST_JOBS = 200;
const MOST_EVENTS = 40;
const SPANS = { "2 min": 120, "5 min": 300, "15 min": 900, "1 h": 3600, "3 h": 10800, "12 h": 43200, "1 d": 86400, "7 d": 604800 };

export class Overview {
  title = "Pipollux";

  constructor(live) {
    this.live = live;
    this.span = null; // as chosen; null: what shows the launches of all jobs that run
    this.tiles = new Tiles(["Running", "Waiting", "Slots in use", "Goodput", "Complete", "Failed"]);
    this.gantt = new Gantt();
    this.jobs = this.#jobTable();
    this.nodes = this.#nodeTable();
    this.events = new Table(EVENT_COLUMNS(this), { key: (event) => event.id, none: "nothing has happened yet" });
    this.phases = h("select", { "aria-label": "Phase", change: () => this.update() }, h("option", { value: "" }, "all phases"),
      ...ORDER.map((name) => h("option", {}, name)));
    this.name = h("input", { type: "search", placeholder: "name", "aria-label": "Name", input: () => this.update() });
    this.element = h("div", { class: "overview" },
      this.tiles.element,
      h("section", { class: "held" }, h("h2", {}, "Who holds what"), this.#spans(), this.gantt.element),
      h("section", { class: "jobs" }, h("h2", {}, "Jobs"), h("div", { class: "choice" }, this.name, this.phases), this.jobs.element),
      h("div", { class: "side" }, section("Nodes", this.nodes.element), section("Events", h("div", { class: "events" }, this.events.element))));
  }

  update() {
    const { data } = this.live;
    if (!data) return;
    this.numbers = new Map(data.jobs.map((job, index) => [job.name, index]));
    this.#figures(data);
    this.draw();
    const wanted = this.name.value.trim().toLowerCase();
    const chosen = data.jobs.filter((job) =>
      (!this.phases.value || phase(job) === this.phases.value) && job.name.toLowerCase().includes(wanted));
    this.jobs.none = data.jobs.length ? "no job is like that" : "no jobs yet; submit some with: pipollux submit FILE";
    this.jobs.update(usual(chosen));
    this.nodes.update(Object.entries(data.nodes).map(([name, node]) => ({ name, ...node, held: held(name, data.jobs) })));
    this.events.update(this.live.events.slice(-MOST_EVENTS).reverse());
  }

  /** Draw what moves as time goes by. */
  draw() {
    const { data, now } = this.live;
    if (!data) return;
    const to = this.live.awaySince ?? now;
    const span = this.span ?? fitting(data, to);
    // What is asked for is as much as can be chosen by itself, or what was chosen.
    this.live.span = this.span ?? SPANS["1 d"];
    for (const button of this.buttons) button.setAttribute("aria-pressed", String(button.span === this.span));
    this.gantt.update({ ...data, numbers: this.numbers, from: to - span, to, now: to });
  }

  #spans() {
    const choose = (span) => () => {
      this.span = span;
      this.live.span = Math.max(span ?? 0, SPANS["1 d"]);
      this.live.refresh();
      this.draw();
    };
    this.buttons = [["all", null], ...Object.entries(SPANS)].map(([title, span]) =>
      Object.assign(h("button", { type: "button", click: choose(span) }, title), { span }));
    return h("div", { class: "choice spans", role: "group", "aria-label": "Span of time" }, ...this.buttons);
  }

  #figures(data) {
    const by = (...names) => data.jobs.filter((job) => names.includes(phase(job))).length;
    const slots = Object.values(data.nodes).reduce((sum, node) => sum + node.slots, 0);
    const used = data.jobs.reduce((sum, job) => sum + job.nodes.length * job.num_stages, 0);
    const told = data.jobs.filter((job) => job.phase === "Running" && job.goodput !== null);
    const goodput = told.reduce((sum, job) => sum + job.goodput, 0);
    const cancelled = by("Cancelled");
    this.tiles.update({
      Running: [by("Running", "Stopping")],
      Waiting: [by("Created", "Queued", "Suspended", "Restarting")],
      "Slots in use": [used, `of ${slots}`],
      Goodput: told.length ? [number(goodput), "samples/s"] : [DASH],
      Complete: [by("Complete")],
      Failed: [by("Failed"), cancelled ? `and ${cancelled} cancelled` : ""],
    });
  }

  #jobTable() {
    const columns = [
      { title: "Job", head: true, text: (job) => job.name, sort: (job) => job.name, fill: (cell, job) => cell.replaceChildren(jobLink(job.name, this.numbers.get(job.name))) },
      { title: "Phase", text: phase, sort: (job) => ORDER.indexOf(phase(job)), fill: (cell, job, text) => cell.replaceChildren(phaseMark(text)) },
      { title: "R×K", kind: "n", text: (job) => (job.nodes.length ? `${job.nodes.length}×${job.num_stages}` : DASH), sort: (job) => job.nodes.length * job.num_stages, down: true },
      { title: "Nodes", kind: "roomy", text: (job) => places(job.nodes), sort: (job) => places(job.nodes), fill: fillPlaces },
      { title: "Epoch", kind: "n ample", text: (job) => epochs(job.epoch, job.num_epochs, job.phase), sort: (job) => job.epoch, down: true },
      { title: "Loss", kind: "n", text: (job) => number(job.loss), sort: (job) => job.loss },
      { title: "Goodput", kind: "n", text: (job) => (job.nodes.length ? number(job.goodput) : DASH), sort: (job) => (job.nodes.length ? job.goodput : null), down: true },
      { title: "Restarts", kind: "n roomy", text: (job) => String(job.num_restarts), sort: (job) => job.num_restarts, down: true },
      { title: "Age", kind: "n short", text: (job) => duration((job.ended_at ?? this.live.now) - job.submitted_at), sort: (job) => (job.ended_at ?? this.live.now) - job.submitted_at },
      { title: "Message", kind: "words wordy", text: (job) => job.message },
    ];
    return new Table(columns, { key: (job) => job.name, most: MOST_JOBS });
  }

  #nodeTable() {
    const slots = (cell, node) => {
      const parts = node.held.map(([job, many]) => h("i", { class: `slot ${colour(this.numbers.get(job))}`, title: job }, ...Array(many).fill(0).map(() => h("b"))));
      const free = Math.max(node.slots - node.held.reduce((sum, [, many]) => sum + many, 0), 0);
      cell.replaceChildren(h("span", { class: "slots" }, ...parts, h("i", { class: "slot none" }, ...Array(free).fill(0).map(() => h("b")))), ` ${node.slots - free} of ${node.slots}`);
    };
    const columns = [
      { title: "Node", head: true, text: (node) => node.name, sort: (node) => node.name },
      { title: "Slots in use", kind: "short", text: (node) => JSON.stringify([node.held, node.slots]), sort: (node) => node.held.length, fill: slots },
      { title: "Condition", text: (node) => node.condition, sort: (node) => node.condition, fill: (cell, node, text) => cell.replaceChildren(phaseMark(text)) },
      { title: "Reason", kind: "words wordy", text: (node) => (node.reason ? `${node.reason} (${moment(node.since)})` : "") },
      { title: "", kind: "n", text: (node) => (node.condition === "ready" ? "drain" : "undrain"), fill: (cell, node, kind) => cell.replaceChildren(actionButton(kind, node.name, () => this.live.refresh())) },
    ];
    return new Table(columns, { key: (node) => node.name, none: "no nodes" });
  }
}

const EVENT_COLUMNS = (page) => [
  { title: "Time", kind: "short", text: (event) => moment(event.time) },
  { title: "Job", text: (event) => event.job ?? "", fill: (cell, event) => cell.replaceChildren(...(event.job ? [jobLink(event.job, page.numbers.get(event.job) ?? 0)] : [])) },
  { title: "What", kind: "words", text: (event) => event.text },
];

/** Those that hold something first, those that have ended last, the latest before the others. */
function usual(jobs) {
  const place = (job) => ORDER.indexOf(phase(job));
  const ended = (job) => job.ended_at !== null;
  return [...jobs].sort((a, b) =>
    ended(a) - ended(b) ||
    (ended(a) ? b.ended_at - a.ended_at : place(a) - place(b) || a.submitted_at - b.submitted_at));
}

/** Slots of a node by job. */
function held(node, jobs) {
  return jobs
    .map((job) => [job.name, job.nodes.filter((name) => name === node).length * job.num_stages])
    .filter(([, slots]) => slots > 0);
}

/** The least span that shows every launch of the jobs that run, and a little more. */
function fitting(data, now) {
  const running = new Set(data.launches.filter((launch) => launch.ended_at === null).map((launch) => launch.job));
  const shown = data.launches.filter((launch) => running.size === 0 || running.has(launch.job));
  const oldest = Math.min(now, ...shown.map((launch) => launch.launched_at));
  return Math.min(Math.max((now - oldest) * 1.04, SPANS["2 min"] / 2), SPANS["1 d"]);
}

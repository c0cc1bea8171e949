// The cluster at a glance: figures, teams, jobs, nodes, forecasts, events.

import { h } from "./dom.js";
import { DASH, moment, number, thousands } from "./format.js";
import { Forecasts } from "./forecasts.js";
import { Jobs } from "./jobs.js";
import { Nodes } from "./nodes.js";
import { Table } from "./table.js";
import { Teams } from "./teams.js";
import { Tiles, jobLink, section } from "./words.js";

const MOST_EVENTS = 40;

export class Overview {
  constructor(live) {
    this.live = live;
    this.tiles = new Tiles(["Slots in use", "Goodput", "Nodes"]);
    this.teams = new Teams(live);
    this.jobs = new Jobs(live);
    this.nodes = new Nodes(live);
    this.forecasts = new Forecasts(live);
    this.events = new Table(this.#eventColumns(), { key: (event) => event.id, none: "nothing has happened yet" });
    this.element = h("div", { class: "overview" },
      this.tiles.element, this.teams.element, this.jobs.element, this.nodes.element, this.forecasts.element,
      section("Events", h("div", { class: "events", tabindex: 0, role: "region", "aria-label": "Last events" }, this.events.element)));
  }

  get title() {
    const phases = this.live.data?.phases;
    if (!phases) return "Pipollux";
    const running = (phases.Running ?? 0) + (phases.Stopping ?? 0);
    return `${running} running, ${phases.Queued ?? 0} queued · Pipollux`;
  }

  /** Show the jobs selected by the address. */
  moved({ choice }) {
    if (!choice) return false;
    this.jobs.choose(choice);
    if (this.live.data) this.jobs.update();
    this.live.refresh();
    return true;
  }

  update() {
    const { data } = this.live;
    if (!data) return;
    this.live.note(data.jobs.map((job) => [job.name, job.number]));
    this.#figures(data);
    this.teams.update();
    this.jobs.update();
    this.nodes.update();
    this.forecasts.update();
    this.events.update(this.live.events.slice(-MOST_EVENTS).reverse());
  }

  /** Draw what changes with time. */
  draw() {
    if (!this.live.data) return;
    this.jobs.draw();
    this.nodes.draw();
  }

  #figures(data) {
    const nodes = Object.values(data.nodes);
    const sum = (name) => nodes.reduce((total, node) => total + node[name], 0);
    const away = nodes.filter((node) => node.condition !== "ready").length;
    this.tiles.update({
      "Slots in use": [thousands(sum("used")), `of ${thousands(sum("slots"))}`],
      Goodput: data.goodput === null ? [DASH] : [number(data.goodput), "samples/s"],
      Nodes: [thousands(nodes.length), away ? `${away} not ready` : ""],
    });
  }

  #eventColumns() {
    const link = (cell, event) => cell.replaceChildren(...(event.job ? [jobLink(event.job, this.live.numbers.get(event.job))] : []));
    return [
      { title: "Time", kind: "short", text: (event) => moment(event.time) },
      { title: "Job", text: (event) => event.job ?? "", fill: link },
      { title: "Event", kind: "words", text: (event) => event.text },
    ];
  }
}

// The list of jobs: counts by phase, search, and a page of the table.

import { h, say } from "./dom.js";
import { span } from "./forecasts.js";
import { DASH, count, duration, epochs, number, places, thousands } from "./format.js";
import { PAGE, address, go, place, question } from "./place.js";
import { Table } from "./table.js";
import { ORDER, SIZE, fillPlaces, jobLink, phaseMark } from "./words.js";

const ALL = "All";

export class Jobs {
  constructor(live) {
    this.live = live;
    this.links = new Map([ALL, ...ORDER].map((name) => [name, h("a", {}, h("span"), h("b"))]));
    this.search = h("input", { type: "search", placeholder: "search by name", "aria-label": "Search jobs by name", input: () => this.#search(), blur: () => (this.typing = false) });
    this.typing = false; // whether further letters belong to the history entry of the first one
    this.table = new Table(this.#columns(), { key: (job) => job.name, href: (column) => this.#sorted(column) });
    this.range = h("span", { role: "status" });
    this.before = h("a", { rel: "prev" }, "‹ previous");
    this.after = h("a", { rel: "next" }, "next ›");
    this.pages = h("nav", { class: "pages", "aria-label": "Pages of jobs" }, this.range, this.before, this.after);
    this.element = h("section", { class: "jobs" }, h("h2", {}, "Jobs"),
      h("div", { class: "choice" },
        h("nav", { class: "phases", "aria-label": "Jobs by phase" }, ...this.links.values()),
        h("form", { role: "search", submit: (event) => event.preventDefault() }, this.search)),
      this.table.element, this.pages, h("p", { class: "note" }, SIZE));
    this.choose(place().choice);
  }

  /** Show the jobs of a choice, once the scheduler has answered. */
  choose(choice) {
    this.choice = choice;
    this.live.query = question(choice);
    if (this.search.value.trim() !== choice.name) this.search.value = choice.name;
    this.table.mark(choice.order, choice.descending);
  }

  update() {
    const { data } = this.live;
    this.#counts(data.phases);
    const late = data.query !== this.live.query;
    this.element.classList.toggle("late", late); // the table still shows another choice
    if (late) return;
    this.table.none = Object.keys(data.phases).length
      ? "no matching jobs" : "no jobs yet; submit some with: pipollux submit FILE";
    this.table.update(data.jobs);
    this.#turn(data);
  }

  draw() {
    if (!this.element.classList.contains("late")) this.table.update(this.live.data.jobs);
  }

  #counts(phases) {
    const total = Object.values(phases).reduce((sum, many) => sum + many, 0);
    for (const [name, link] of this.links) {
      const many = name === ALL ? total : phases[name] ?? 0;
      const chosen = name === ALL ? !this.choice.phases.length : this.choice.phases.includes(name);
      link.hidden = !many && !chosen && name !== ALL;
      link.className = name === ALL ? "" : `phase ${name.toLowerCase()}`;
      link.setAttribute("href", address({ ...this.choice, phases: name === ALL ? [] : [name], page: 1 }));
      if (chosen) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
      say(link.firstChild, `${name} `);
      say(link.lastChild, thousands(many));
    }
  }

  #turn({ jobs, num_found }) {
    const first = (this.choice.page - 1) * PAGE;
    const several = num_found > PAGE || first > 0;
    const shown = jobs.length ? `${thousands(first + 1)} to ${thousands(first + jobs.length)} of ` : "";
    say(this.range, several ? `${shown}${count(thousands(num_found), "job")}` : "");
    const last = Math.max(Math.ceil(num_found / PAGE), 1);
    this.before.hidden = this.choice.page <= 1;
    this.after.hidden = this.choice.page >= last;
    this.before.href = address({ ...this.choice, page: Math.min(this.choice.page - 1, last) });
    this.after.href = address({ ...this.choice, page: this.choice.page + 1 });
  }

  #search() {
    const name = this.search.value.trim();
    if (name === this.choice.name) return;
    go({ ...this.choice, name, page: 1 }, { replace: this.typing });
    this.typing = true;
  }

  #sorted({ order, down }) {
    const again = this.choice?.order === order;
    return address({ ...(this.choice ?? place().choice), order, descending: again ? !this.choice.descending : Boolean(down), page: 1 });
  }

  #columns() {
    const held = (job, text) => (job.nodes.length ? text : DASH);
    const age = (job) => duration((job.ended_at ?? this.live.now) - job.submitted_at);
    return [
      { title: "Job", head: true, order: "name", text: (job) => job.name, fill: (cell, job) => cell.replaceChildren(jobLink(job.name, job.number)) },
      { title: "Phase", order: "phase", text: (job) => job.phase, fill: (cell, job, text) => cell.replaceChildren(phaseMark(text)) },
      { title: "R×K", kind: "n", order: "slots", down: true, text: (job) => held(job, `${job.nodes.length}×${job.num_stages}`) },
      { title: "Nodes", order: "nodes", text: (job) => places(job.nodes), fill: fillPlaces },
      { title: "Epoch", kind: "n", order: "epoch", down: true, text: (job) => epochs(job.epoch, job.num_epochs, job.phase) },
      { title: "Loss", kind: "n", order: "loss", text: (job) => number(job.loss) },
      { title: "Goodput", kind: "n", order: "goodput", down: true, text: (job) => held(job, number(job.goodput)) },
      { title: "Restarts", kind: "n", order: "restarts", down: true, text: (job) => String(job.num_restarts) },
      { title: "Age", kind: "n short", order: "age", text: age },
      { title: "Ends in", kind: "short", text: (job) => span(job.forecast?.end, this.live.now) },
      { title: "Message", kind: "words", text: (job) => job.message },
    ];
  }
}

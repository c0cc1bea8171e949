// The teams: their quotas, slots used, borrowed and lent, and waiting jobs.

import { quietly } from "./api.js";
import { h, say } from "./dom.js";
import { DASH, moment, thousands } from "./format.js";
import { Table } from "./table.js";
import { jobLink } from "./words.js";

const SELDOM_MS = 2000;
const SHARE = 20; // pause between two requests, in multiples of the duration of a request
const MOST_NAMED = 3;

export class Teams {
  constructor(live) {
    this.live = live;
    this.table = new Table(this.#columns(), { key: (team) => team.name, none: "no teams" });
    this.note = h("p", { class: "note", role: "status" });
    this.element = h("section", { class: "teams", hidden: true }, h("h2", {}, "Teams"), this.table.element, this.note);
    this.pause = 0;
    this.asked = -Infinity;
  }

  update() {
    const { data, awaySince } = this.live;
    this.element.hidden = !data.has_teams;
    if (data.has_teams && awaySince === null && !this.asking && performance.now() - this.asked >= this.pause) this.#ask();
  }

  async #ask() {
    this.asking = true;
    this.asked = performance.now();
    const found = await quietly("/teams");
    this.pause = Math.max(SELDOM_MS, SHARE * (performance.now() - this.asked));
    this.asking = false;
    if (!found) return;
    this.table.update(found.teams);
    const quotas = found.teams.reduce((sum, team) => sum + team.quota, 0);
    say(this.note, quotas > found.slots ? `The quotas are ${thousands(quotas)} slots, but there are only ${thousands(found.slots)}: each team gets its share.` : "");
  }

  #columns() {
    const limited = (many, most) => (most === null ? String(many) : `${many} of ${most}`);
    return [
      { title: "Team", head: true, text: (team) => team.name },
      { title: "Quota", kind: "n", text: (team) => String(team.quota) },
      { title: "Used", kind: "n", text: (team) => String(team.used) },
      { title: "Borrowed", kind: "n", text: (team) => limited(team.borrowed, team.borrow) },
      { title: "Lent", kind: "n", text: (team) => limited(team.lent, team.lend) },
      { title: "Weight", kind: "n", text: (team) => String(team.weight) },
      { title: "Running", kind: "n", text: (team) => limited(team.running.length, team.max_jobs) },
      { title: "Submitted", kind: "n", text: (team) => limited(team.submitted, team.max_submit_jobs) },
      { title: "Waiting", text: (team) => named(team.waiting), fill: (cell, team) => this.#link(cell, team.waiting) },
      { title: "Gives back", kind: "short", text: (team) => (team.until === null ? DASH : moment(team.until)) },
    ];
  }

  #link(cell, names) {
    const links = names.slice(0, MOST_NAMED).flatMap((name, i) => [i ? ", " : "", jobLink(name, this.live.numbers.get(name))]);
    cell.replaceChildren(...(names.length ? [...links, rest(names)] : [DASH]));
  }
}

function named(names) {
  return names.length ? names.slice(0, MOST_NAMED).join(", ") + rest(names) : DASH;
}

function rest(names) {
  return names.length > MOST_NAMED ? ` and ${names.length - MOST_NAMED} more` : "";
}

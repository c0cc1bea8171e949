// How jobs are told of in several places: names with their colour, phases, tiles.

import { colour, h, say } from "./dom.js";

/** The phase as people are told it: one that was cancelled is not one that failed. */
export function phase(job) {
  if (job.phase === "Failed" && job.reason === "Cancelled") return "Cancelled";
  if (job.phase === "Running" && job.intent) return "Stopping";
  return job.phase;
}

/** Whether a generation failed; one that was to end did not, though it may not have saved. */
export function hasFailed(generation) {
  return generation.outcome === "failed" && !generation.intent;
}

/** How a generation ended, as people are told it. */
export function outcome(generation) {
  return generation.outcome === "failed" && generation.intent ? "ended unsaved" : generation.outcome;
}

export const ORDER = ["Running", "Stopping", "Restarting", "Created", "Queued", "Suspended", "Failed", "Cancelled", "Complete"];

export function phaseMark(text) {
  return h("span", { class: `phase ${text.toLowerCase()}` }, text);
}

export function jobLink(name, number) {
  return h("a", { href: `#/jobs/${encodeURIComponent(name)}`, class: `job ${colour(number)}` }, number ? h("i", { class: "chip" }) : null, name);
}

/** Fill a cell with nodes as `places` spells them; a line does not end within a name. */
export function fillPlaces(cell, _thing, text) {
  cell.replaceChildren(...text.split(", ").flatMap((place, i) => [i ? ", " : "", h("span", { class: "place" }, place)]));
}

/** Figures in a row, each with what it is; `update` takes [value, rest] by title. */
export class Tiles {
  constructor(titles) {
    this.values = new Map(titles.map((title) => [title, [h("span"), h("small")]]));
    this.element = h("dl", { class: "tiles" },
      ...titles.map((title) => h("div", {}, h("dt", {}, title), h("dd", {}, ...this.values.get(title)))));
  }

  update(figures) {
    for (const [title, [value, rest]] of Object.entries(figures)) {
      const [large, small] = this.values.get(title);
      say(large, String(value));
      say(small, rest ? ` ${rest}` : "");
    }
  }
}

/** A section with a heading. */
export function section(title, ...children) {
  return h("section", {}, h("h2", {}, title), ...children);
}

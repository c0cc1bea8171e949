// Shared elements for jobs: names with their colour, phases, tiles.

import { colour, h, say } from "./dom.js";

/** Return the displayed phase: a cancelled job is not shown as failed. */
export function phase(job) {
  if (job.phase === "Failed" && job.reason === "Cancelled") return "Cancelled";
  if (job.phase === "Running" && job.intent) return "Stopping";
  return job.phase;
}

/** Whether an attempt failed; a stopped attempt did not, even without a checkpoint. */
export function hasFailed(attempt) {
  return attempt.outcome === "failed" && !attempt.intent;
}

/** Return the title of an attempt, or of a later membership of it. */
export function titled({ attempt, membership }) {
  return `attempt ${attempt}${membership > 1 ? `, membership ${membership}` : ""}`;
}

/** Return the outcome of an attempt, in words. */
export function outcome(attempt) {
  return attempt.outcome === "failed" && attempt.intent ? "ended unsaved" : attempt.outcome;
}

export const ORDER = ["Running", "Stopping", "Restarting", "Created", "Queued", "Suspended", "Failed", "Cancelled", "Complete"];

/** Explanation of sizes in tables. */
export const SIZE = "R×K: R pipeline replicas of K stages each, on R·K slots.";

export function phaseMark(text) {
  return h("span", { class: `phase ${text.toLowerCase()}` }, text);
}

export function jobLink(name, number) {
  return h("a", { href: `#/jobs/${encodeURIComponent(name)}`, class: `job ${colour(number)}` }, number ? h("i", { class: "chip" }) : null, name);
}

/** Fill a cell with nodes as `places` spells them; lines do not break within a name. */
export function fillPlaces(cell, _thing, text) {
  cell.replaceChildren(...text.split(", ").flatMap((place, i) => [i ? ", " : "", h("span", { class: "place" }, place)]));
}

/** A row of figures with their titles; `update` takes [value, rest] by title. */
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

/** Return a GPU or MIG slice in a line: its name, use, job and problem. */
export function deviceLine(one) {
  const [kind, ...rest] = one.id.split("-");
  const index = one.index === null ? "" : ` ${one.index}`;
  const title = `${kind === "MIG" ? "MIG slice of GPU" : "GPU"}${index} (${kind}-${rest[0]})`;
  const gib = (bytes) => Number((bytes / 2 ** 30).toPrecision(3));
  return [
    title,
    one.utilization === null ? "" : `${Math.round(100 * one.utilization)} %`,
    one.memory_used === null ? "" : `${gib(one.memory_used)} of ${gib(one.memory_total)} GiB`,
    one.job ?? "",
    one.problem ? `left out: ${one.problem}` : "",
  ].filter(Boolean).join(" · ");
}

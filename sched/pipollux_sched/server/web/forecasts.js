// Forecasts: intervals in words, and how past forecasts turned out.

import { quietly } from "./api.js";
import { h, say } from "./dom.js";
import { DASH, count, duration, moment } from "./format.js";
import { Table } from "./table.js";
import { jobLink, section } from "./words.js";

const SELDOM_MS = 20_000;
const SHARE = 50; // pause between two requests, in multiples of the duration of a request

/** Return an 80 % interval as times from now. */
export function span(estimate, now) {
  if (!estimate || estimate.low === null) return DASH;
  if (estimate.high !== null && estimate.high < now - 1) return "overdue";
  const low = duration(estimate.low - now);
  if (estimate.high === null) return `over ${low}`;
  const high = duration(estimate.high - now);
  return low === high ? high : `${low} to ${high}`;
}

/** Return an 80 % interval by the clock. */
export function between(estimate) {
  if (!estimate || estimate.low === null) return DASH;
  const [low, median] = [moment(estimate.low), moment(estimate.median)];
  const high = estimate.high === null ? "later" : moment(estimate.high);
  if (low === high) return low;
  return `${low} to ${high}${estimate.median === null ? "" : `, median ${median}`}`;
}

/** The recorded forecasts of completed jobs beside what happened. */
export class Forecasts {
  constructor(live) {
    this.live = live;
    this.table = new Table(this.#columns(), { key: (one) => `${one.job} ${one.made_at}`, most: 10 });
    this.summary = h("p", { class: "note", role: "status" });
    this.element = section("Past forecasts", this.summary, this.table.element);
    this.element.classList.add("forecasts");
    this.element.hidden = true;
    this.pause = 0;
    this.asked = -Infinity;
  }

  update() {
    if (this.live.awaySince !== null || this.asking || performance.now() - this.asked < this.pause) return;
    this.#ask();
  }

  async #ask() {
    this.asking = true;
    this.asked = performance.now();
    const found = await quietly("/forecasts");
    this.pause = Math.max(SELDOM_MS, SHARE * (performance.now() - this.asked));
    this.asking = false;
    if (!found) return;
    this.element.hidden = found.past.length === 0;
    say(this.summary, told(found.accuracy));
    this.table.update([...found.past].reverse());
  }

  #columns() {
    const left = (one) => one.ended_at - one.made_at;
    const error = (one) => (one.end.median === null || left(one) <= 0 ? DASH : `${Math.round((100 * Math.abs(one.end.median - one.ended_at)) / left(one))} %`);
    return [
      { title: "Job", head: true, text: (one) => one.job, fill: (cell, one) => cell.replaceChildren(jobLink(one.job, this.live.numbers.get(one.job))) },
      { title: "Forecast made", kind: "short", text: (one) => moment(one.made_at) },
      { title: "End, as forecast", text: (one) => between(one.end) },
      { title: "Ended", kind: "short", text: (one) => moment(one.ended_at) },
      { title: "In the interval", text: (one) => (one.covered === null ? DASH : one.covered ? "yes" : "no") },
      { title: "Error", kind: "n", text: error },
    ];
  }
}

function told({ num_ends, ends_covered, num_starts, starts_covered, median_error }) {
  if (!num_ends) return "";
  const percent = (share) => `${Math.round(100 * share)} %`;
  const starts = num_starts ? `, and ${percent(starts_covered)} of ${count(num_starts, "start")}` : "";
  const error = median_error === null ? "" : ` The median error of an end is ${percent(median_error)} of the time that was left.`;
  return `Intervals are meant to hold with 80 %. They held ${percent(ends_covered)} of ${count(num_ends, "end")}${starts}.${error}`;
}

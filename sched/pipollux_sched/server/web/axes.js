// Where the ticks of an axis stand, and what they say.

import { day, pad } from "./format.js";

const SPANS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
const DAY = 86400;

/** About `wanted` round values from `low` to `high`, both covered, at least `least` apart. */
export function ticks(low, high, wanted, least = 0) {
  const span = high - low || Math.abs(high) || 1;
  const raw = Math.max(span / Math.max(wanted, 1), least);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((part) => part * power).find((size) => size >= raw * 0.999);
  const first = Math.floor(low / step + 1e-9);
  const last = Math.ceil(high / step - 1e-9);
  const values = [];
  // A multiple of the step, not a sum of steps: 0.3, and not 0.30000000000000004.
  for (let i = first; i <= Math.max(last, first + 1); i += 1) values.push(Number((i * step).toPrecision(12)));
  return values;
}

/** At most `wanted` round moments of the local clock from `from` to `to`: [{ value, label }]. */
export function timeTicks(from, to, wanted) {
  const least = (to - from) / Math.max(wanted, 1);
  const days = Math.ceil(least / DAY) * DAY;
  const step = SPANS.find((size) => size >= least) ?? days;
  const offset = new Date(from * 1000).getTimezoneOffset() * 60;
  const found = [];
  for (let local = Math.ceil((from - offset) / step) * step; local + offset <= to; local += step) {
    found.push({ value: local + offset, label: label(new Date((local + offset) * 1000), step) });
  }
  return found;
}

function label(date, step) {
  if (step >= DAY || (step >= 3600 && date.getHours() === 0)) return day(date);
  const parts = [date.getHours(), date.getMinutes()];
  return step < 60 ? pad(...parts, date.getSeconds()) : pad(...parts);
}

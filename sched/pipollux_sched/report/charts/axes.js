// Axes: positions and labels of their ticks.

import { day, elapsed, moment, pad, percent, seconds, short, thousands } from "./format.js";

const SPANS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
const DAY = 86400;
const LENGTHS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800,
  ...[1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].map((hours) => hours * 3600)];

/** Formats of values: on an axis, and alone. */
export const SPELL = {
  number: { tick: short, value: short },
  whole: { tick: short, value: (value) => thousands(Math.round(value)) },
  share: { tick: percent, value: percent },
  seconds: { tick: short, value: seconds },
  length: { tick: length, value: length },
  elapsed: { tick: elapsed, value: elapsed },
  moment: { tick: moment, value: moment },
};

/** Return about `wanted` ticks of a horizontal axis: [{ value, label }], all within it. */
export function xTicks(kind, low, high, wanted) {
  if (kind === "moment") return timeTicks(low, high, wanted);
  if (kind === "elapsed") return timeTicks(low, high, wanted, false);
  const values = kind === "length" ? lengthTicks(low, high, wanted) : Plot.ticks(low, high, wanted);
  const found = kind === "whole" ? values.filter(Number.isInteger) : values;
  return found.map((value) => ({ value, label: SPELL[kind].tick(value) }));
}

/** Return about `wanted` round values from `low` to `high`; with `whole`, integers if there are any. */
export function yTicks(low, high, wanted, whole = false) {
  const [first, last] = Plot.nice(low, high > low ? high : low + (Math.abs(low) || 1), wanted);
  const values = Plot.ticks(first, last, wanted);
  return whole && values.some(Number.isInteger) ? wholeOnes(values) : values;
}

function wholeOnes(values) {
  const found = values.filter(Number.isInteger);
  const last = Math.ceil(values.at(-1));
  return found.at(-1) < last ? [...found, last] : found;
}

/** Return at most `wanted` round times from `from` to `to`, by the local clock or one that starts at 0. */
export function timeTicks(from, to, wanted, local = true) {
  const least = (to - from) / Math.max(wanted, 1);
  const days = Math.ceil(least / DAY) * DAY;
  const step = SPANS.find((size) => size >= least) ?? days;
  const offset = local ? new Date(from * 1000).getTimezoneOffset() * 60 : 0;
  const found = [];
  for (let at = Math.ceil((from - offset) / step) * step; at + offset <= to; at += step) {
    found.push({ value: at + offset, label: local ? label(new Date((at + offset) * 1000), step) : elapsed(at) });
  }
  return found;
}

/** Return round durations for a logarithmic axis, spaced so that their labels do not overlap. */
function lengthTicks(low, high, wanted) {
  const apart = Math.log(high / low) / Math.max(wanted, 1);
  const found = [];
  for (const one of LENGTHS.filter((value) => value >= low && value <= high)) {
    if (!found.length || Math.log(one / found.at(-1)) > apart * 0.8) found.push(one);
  }
  return found;
}

function label(date, step) {
  if (step >= DAY || (step >= 3600 && date.getHours() === 0)) return day(date);
  const parts = [date.getHours(), date.getMinutes()];
  return step < 60 ? pad(...parts, date.getSeconds()) : pad(...parts);
}

/** Return a round duration, in whole hours from one hour on. */
function length(value) {
  return value >= 3600 ? `${short(value / 3600)} h` : value >= 60 ? `${short(value / 60)} min` : value >= 1 ? `${short(value)} s` : `${short(value * 1000)} ms`;
}

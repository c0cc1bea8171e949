// Formatting of numbers, durations and times.

export const DASH = "–";

/** Format a number with three significant digits: 0.0123, 1.50, 812, 12 300, 1.25e-7. */
export function number(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  if (value === 0) return "0";
  const magnitude = Math.floor(Math.log10(Math.abs(value)));
  if (magnitude < -4 || magnitude > 9) return value.toExponential(digits - 1);
  if (magnitude >= digits) return thousands(Math.round(value));
  return value.toFixed(Math.max(digits - 1 - magnitude, 0));
}

const LARGE = [[1e9, "G"], [1e6, "M"], [1e5, "k"]];

/** Format it without trailing zeros, for ticks: 1.5, 0.2, 250 k. */
export function short(value) {
  const [least, unit] = LARGE.find(([size]) => Math.abs(value) >= size) ?? [0, ""];
  if (unit && Math.abs(value) < 1e12) return `${short(value / (unit === "k" ? 1e3 : least))}\u202f${unit}`;
  const text = number(value);
  return /^-?\d+\.\d*$/.test(text) ? String(Number(text)) : text;
}

/** A whole number: 12 300. */
export function thousands(value) {
  return String(value).replace(/\B(?=(\d{3})+$)/g, "\u202f");
}

/** A time step: 12.3 ms, 1.5 s. */
export function seconds(value) {
  if (value === null || value === undefined) return DASH;
  if (value === 0) return "0 s";
  const [size, unit] = value >= 1 ? [1, "s"] : value >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
  return `${number(value / size)} ${unit}`;
}

/** A duration: 42 s, 3 m 07 s, 5 h 12 m, 3 d 04 h. */
export function duration(value) {
  const whole = Math.max(Math.floor(value), 0);
  const two = (part) => String(part).padStart(2, "0");
  const [d, hours, m, sec] = [
    Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60, whole % 60,
  ];
  if (d) return `${d} d ${two(hours)} h`;
  if (hours) return `${hours} h ${two(m)} m`;
  return m ? `${m} m ${two(sec)} s` : `${sec} s`;
}

/** The time of the day, with the date where it is not today's. */
export function moment(time) {
  if (time === null || time === undefined) return DASH;
  const date = new Date(time * 1000);
  const clock = pad(date.getHours(), date.getMinutes(), date.getSeconds());
  return date.toDateString() === new Date().toDateString() ? clock : `${day(date)} ${clock}`;
}

export function day(date) {
  return date.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
}

export function pad(...parts) {
  return parts.map((part) => String(part).padStart(2, "0")).join(":");
}

/** Nodes of an allocation, each once: node-a ×2, node-b. */
export function places(nodes) {
  const counts = new Map();
  for (const node of nodes) counts.set(node, (counts.get(node) ?? 0) + 1);
  const spelt = [...counts].sort().map(([node, n]) => (n === 1 ? node : `${node} ×${n}`));
  return spelt.join(", ") || DASH;
}

/** A count and its noun: 1 replica, 2 replicas. */
export function count(many, noun) {
  return `${many} ${noun}${many === 1 ? "" : "s"}`;
}

/** Format completed epochs out of all; points count from 0. */
export function epochs(epoch, numEpochs, phase) {
  if (epoch === null || epoch === undefined) return DASH;
  const done = epoch + (phase === "Complete" ? 1 : 0);
  return numEpochs === null || numEpochs === undefined ? String(done) : `${done}/${numEpochs}`;
}

/** Format a time of a run that started at 0: 0:05, 3:05, 1:01:40. */
export function elapsed(value) {
  const whole = Math.round(Math.max(value, 0));
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  return hours ? `${hours}:${pad(minutes, rest)}` : `${minutes}:${pad(rest)}`;
}

/** A share as a percentage, with a decimal below ten. */
export function percent(share) {
  const value = 100 * share;
  return `${value.toFixed(value && Math.abs(value) < 9.95 && !Number.isInteger(value) ? 1 : 0)}\u202f%`;
}

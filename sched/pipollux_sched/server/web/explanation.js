// The explanation of a job's allocation, as `pipollux explain` prints it.

import { h } from "./dom.js";
import { between } from "./forecasts.js";
import { DASH, count, moment, places, thousands } from "./format.js";
import { Table } from "./table.js";

/** Return the elements of an explanation. */
export function explanation(why) {
  const parts = [h("p", {}, has(why))];
  if (why.last_decision) {
    parts.push(h("h3", {}, "Last decision"), h("p", {}, decision(why.last_decision)));
  }
  const changes = nextChange(why);
  if (changes.length) parts.push(h("h3", {}, "Changes"), ...changes.map((words) => h("p", {}, words)));
  if (why.waits_for) parts.push(h("h3", {}, "Waits for"), h("p", {}, why.waits_for));
  if (why.forecast) {
    const { start, end, note } = why.forecast;
    const starts = start ? `Starts ${between(start)}. ` : "";
    const told = note && end.low === null ? `None: ${note}.` : `${starts}Ends ${between(end)}${note ? `; ${note}` : ""}.`;
    parts.push(h("h3", {}, "Forecast"), h("p", {}, told));
  }
  if (why.more) parts.push(h("h3", {}, "Alternatives"), alternatives(why));
  if (why.limits.length) {
    parts.push(h("h3", {}, "Limits"), h("ul", {}, ...why.limits.map((limit) => h("li", {}, limit.text))));
  }
  return parts;
}

function has(why) {
  if (["Complete", "Failed"].includes(why.phase)) return had(why.last_decision);
  if (why.reason === "Sweeping") return "It is a sweep: only its trials hold slots.";
  if (!why.nodes.length) return "It holds no slots.";
  return `It has ${count(why.nodes.length, "replica")} of ${count(why.num_stages, "stage")} on ${places(why.nodes)}.`;
}

/** Return the last allocation of a job that has ended. */
function had(last) {
  if (!last?.nodes.length) return "It held no slots when it ended.";
  return `It had ${count(last.nodes.length, "replica")} on ${places(last.nodes)} when it ended.`;
}

/** Describe a change in progress, and whether the next change needs a restart. */
function nextChange({ changing, next_change }) {
  const found = changing ? [`Changing: ${changing}.`] : [];
  if (next_change?.why_restart) found.push(`A change would be a restart: ${next_change.why_restart}.`);
  else if (next_change) found.push("A change would be an elastic resize: replicas join and leave while the others train, if one replica stays where it is and the number of stages stays the same.");
  return found;
}

function decision(last) {
  const kind = last.why_restart ? ` A restart: ${last.why_restart}.` : last.elastic ? " An elastic resize: the others train while replicas join or leave." : "";
  const first = `${moment(last.time)}: ${last.why}.${kind}`;
  if (last.speedup === null || last.speedup === undefined) {
    return `${first} Its speedup was not predicted: nothing had been measured yet.`;
  }
  const before = last.previous_speedup == null ? "it held no slots before" : `${last.previous_speedup.toFixed(2)} before`;
  const batch = last.batch_size ? `, at a batch size of ${thousands(last.batch_size)}` : "";
  return `${first} Predicted speedup ${last.speedup.toFixed(2)}, ${before}${batch}.`;
}

function alternatives(why) {
  const { nodes, speedup, batch_size } = why;
  const now = { nodes, num_replicas: nodes.length, speedup, batch_size, fits: true };
  const rows = [["one fewer", why.fewer], ["it has", now], ["one more", why.more]].filter(([, one]) => one);
  const table = new Table([
    { title: "", head: true, text: ([title]) => title },
    { title: "Replicas", kind: "n", text: ([, one]) => String(one.num_replicas) },
    { title: "Where", text: ([, one]) => places(one.nodes) },
    { title: "Speedup", kind: "n", text: ([, one]) => (one.speedup === null ? "not known" : one.speedup.toFixed(2)) },
    { title: "Batch size", kind: "n", text: ([, one]) => (one.batch_size === null ? DASH : thousands(one.batch_size)) },
    { title: "", text: ([, one]) => (one.fits ? "" : "no room now") },
  ], { key: ([title]) => title });
  table.update(rows);
  return table.element;
}

// Gantt chart of the slots: a row for each slot of each node, a block for each replica.

import { h } from "./dom.js";
import { count, duration, moment, places, seconds } from "./format.js";
import { Timeline } from "./timeline.js";
import { hasFailed, outcome, titled } from "./words.js";

const HEIGHT = 460; // of all rows, while each has room
const EDGE = 26; // right of now

/** The chart; a click on a block, or Enter, opens its job. */
export class Gantt {
  constructor() {
    const open = ({ attempt }) => (location.hash = `#/jobs/${encodeURIComponent(attempt.job)}`);
    this.timeline = new Timeline(null, { open });
    this.element = h("div", { class: "scroll" }, this.timeline.element);
  }

  /**
   * @param view { nodes: {name: {slots, condition}}, attempts, from, to, now, left, right };
   * `left` and `right` are margins; without a left one, names have what they need.
   */
  update({ nodes, attempts, from, to, now, left = null, right = EDGE }) {
    const names = Object.keys(nodes);
    const slots = names.reduce((sum, name) => sum + nodes[name].slots, 0);
    const blocks = layOut(attempts, nodes);
    const jobs = new Set(attempts.filter((attempt) => attempt.ended_at === null).map((attempt) => attempt.job));
    this.timeline.update({
      title: `Allocation of ${count(slots, "slot")} over time: ${count(jobs.size, "job")} now`,
      x: { kind: "moment", low: from, high: to },
      row: Math.max(4, Math.min(22, Math.floor(HEIGHT / Math.max(slots, 1)))),
      gap: 6,
      left,
      right,
      now,
      groups: names.map((name) => ({ name: left === null ? name : "", rows: nodes[name].slots, state: nodes[name].condition })),
      blocks: blocks.map((block) => shown(block, names.indexOf(block.node), now)),
    });
  }
}

function shown({ key, attempt, slot, slots, begin, number }, group, now) {
  const to = Math.max(attempt.ended_at ?? now, begin);
  const trained = Math.min(Math.max(attempt.first_step_at ?? to, begin), to);
  const end = Math.min(Math.max(attempt.stopping_at ?? to, trained), to);
  const tip = [
    `${attempt.job} · ${titled(attempt)}`,
    ["where", places(attempt.nodes)],
    ["replicas × stages", `${attempt.nodes.length} × ${attempt.num_stages}`],
    ["from", moment(attempt.created_at)],
    ["for", duration(to - attempt.created_at)],
    ...(attempt.pause_seconds == null ? [] : [["resized, paused for", seconds(attempt.pause_seconds)]]),
    ["", state(attempt)],
  ];
  const style = hasFailed(attempt) ? "failed" : "";
  return { key, attempt, group, row: slot, rows: slots, colour: number ? number - 1 : 0, start: begin, begin: trained, end, to, style, words: [attempt.job], tip };
}

function state(attempt) {
  if (attempt.outcome === "changed") return "then replicas joined or left, and the others trained on";
  if (attempt.ended_at !== null) return `ended: ${outcome(attempt) ?? "not known how"}`;
  if (attempt.stopping_at !== null) return "is being stopped";
  return attempt.first_step_at === null ? "starts" : "trains";
}

/**
 * Assign each replica the lowest free slots of its node, oldest attempt first. Which of a node's
 * slots a replica is drawn in is a matter of layout: the scheduler reports nodes, not slots. Replicas of
 * an attempt that resizes stay in their slots.
 */
export function layOut(attempts, nodes) {
  const taken = new Map(Object.entries(nodes).map(([name, node]) => [name, Array(node.slots).fill(-Infinity)]));
  const holders = new Map(Object.entries(nodes).map(([name, node]) => [name, Array(node.slots)]));
  const blocks = [];
  const ordered = [...attempts].sort((a, b) => a.created_at - b.created_at);
  for (const attempt of ordered) {
    const own = `${attempt.job} ${attempt.attempt}`;
    attempt.nodes.forEach((node, replica) => {
      const ends = taken.get(node);
      if (!ends) return; // the node is gone
      const stayed = (slot) => (holders.get(node)[slot] === own && ends[slot] === attempt.created_at ? 0 : 1);
      const order = ends.map((end, slot) => [end > attempt.created_at ? end : -Infinity, stayed(slot), slot]);
      order.sort((a, b) => (a[0] === b[0] ? a[1] - b[1] || a[2] - b[2] : a[0] - b[0]));
      const chosen = order.slice(0, attempt.num_stages).map((one) => one[2]).sort((a, b) => a - b);
      // It may be assigned while earlier attempts still checkpoint: it holds the slots from then on.
      const left = chosen.map((slot) => ends[slot]).filter((end) => end < (attempt.ended_at ?? Infinity));
      const begin = Math.max(attempt.created_at, ...left);
      for (const slot of chosen) ends[slot] = attempt.ended_at ?? Infinity;
      for (const slot of chosen) holders.get(node)[slot] = own;
      for (const [slot, slots] of runs(chosen)) {
        const key = `${own} ${attempt.membership} ${replica} ${slot}`;
        blocks.push({ key, attempt, node, slot, slots, begin, number: attempt.number });
      }
    });
  }
  return blocks;
}

/** Group neighbouring slots: [[first, count], …]. */
function runs(slots) {
  const found = [];
  for (const slot of slots) {
    const last = found.at(-1);
    if (last && last[0] + last[1] === slot) last[1] += 1;
    else found.push([slot, 1]);
  }
  return found;
}

// The page of one job: allocation and its explanation, curves, attempts, conditions, log.

import { actionButton } from "./actions.js";
import { Away, Refusal, ask } from "./api.js";
import { Chart } from "./chart.js";
import { colour, h, say } from "./dom.js";
import { explanation } from "./explanation.js";
import { between } from "./forecasts.js";
import { DASH, count, duration, epochs, moment, number, places, seconds, thousands } from "./format.js";
import { Table } from "./table.js";
import { SIZE, Tiles, deviceLine, fillPlaces, outcome, phase, phaseMark, section, titled } from "./words.js";

const POINTS = 400;
const LINES = 60;
const CODE = new Set(["Image", "Script", "Arguments"]);
const SELDOM = 3; // number of updates between two requests of log and explanation

const byTime = (points, name) => points.filter((p) => p[name] !== null).map((p) => [p.time, p[name]]);

export class JobPage {
  #asked = 0;
  #asking = false;
  #soon = false;

  constructor(live, name) {
    live.query = "limit=0";
    Object.assign(this, { live, name, title: `${name} · Pipollux`, path: `/jobs/${encodeURIComponent(name)}` });
    this.charts = {
      goodput: new Chart("Goodput", "samples/s", [{ name: "goodput", style: "" }], { smooth: true }),
      loss: new Chart("Loss", "", [{ name: "loss", style: "" }], { zero: false, smooth: true }),
      step: new Chart("Step time", "s", [{ name: "measured", style: "" }, { name: "predicted", style: "second" }], { kind: "seconds", smooth: true }),
      batch: new Chart("Batch size", "samples", [{ name: "batch size", style: "step" }], { kind: "whole" }),
      noise: new Chart("Gradient noise scale", "samples", [{ name: "noise scale", style: "" }]),
      slots: new Chart("Slots held", "", [{ name: "slots", style: "step" }], { kind: "whole" }),
    };
    this.mark = h("span");
    this.buttons = h("span", { class: "buttons" });
    this.message = h("p", { class: "summary" });
    this.lines = h("pre", { class: "log", tabindex: 0, "aria-label": "Log" }, "");
    this.which = h("select", { "aria-label": "Replica", change: () => this.#showLog() });
    this.logs = [];
    this.why = h("div", { class: "why-it" });
    this.facts = h("dl", { class: "facts" });
    this.tiles = new Tiles(["Has", "Epoch", "Loss", "Goodput", "Batch size", "Restarts"]);
    this.attempts = new Table(ATTEMPTS, { key: ({ attempt, membership }) => `${attempt}.${membership}`, most: 50, none: "none yet" });
    this.conditions = new Table(CONDITIONS, { key: (condition) => condition.type });
    this.fault = h("p", { class: "fault", role: "alert", hidden: true });
    this.body = h("div", { hidden: true }, this.#body());
    this.element = h("div", { class: "page" }, h("p", { class: "back" }, h("a", { href: "#/" }, "← cluster")), this.fault, this.body);
    this.told = (event) => event.detail.job === name && (this.#soon = true);
    live.addEventListener("told", this.told);
  }

  leave() {
    this.live.removeEventListener("told", this.told);
  }

  /** Request the job, and less often its log and explanation. */
  async update() {
    if (this.#asking || this.live.awaySince !== null) return;
    this.#asking = true;
    const seldom = this.#asked % SELDOM === 0 || this.#soon;
    this.#soon = false;
    try {
      const job = await ask(`${this.path}?points=${POINTS}`);
      this.#show(job);
      if (seldom) await this.#askMore(job);
      this.#asked += 1;
      this.fault.hidden = true;
    } catch (error) {
      if (error instanceof Refusal) {
        say(this.fault, error.message);
        this.fault.hidden = false;
      } else if (!(error instanceof Away)) throw error;
    } finally {
      this.#asking = false;
    }
  }

  draw() {}

  #body() {
    const all = Object.values(this.charts).map((chart) => chart.element);
    this.silence = h("p", { class: "note", hidden: true }, "No reports yet.");
    this.key = h("p", { class: "note" }, h("span", { class: "key restart" }, "started again"), " ", h("span", { class: "key change" }, "resized"));
    this.progress = section("Progress", this.key, this.silence, h("div", { class: "curves" }, ...all));
    this.log = section("Log", h("div", { class: "choice" }, this.which), this.lines);
    return h("div", {},
      h("header", { class: "head" }, h("h1", {}, this.name), this.mark, this.buttons),
      this.message,
      this.tiles.element,
      this.facts,
      this.progress,
      section("Allocation and reasons", this.why),
      section("Attempts", this.attempts.element, h("p", { class: "note" }, SIZE)),
      section("Conditions", this.conditions.element),
      this.log);
  }

  #show(job) {
    this.live.note([[this.name, job.number]]);
    this.body.className = colour(job.number);
    this.body.hidden = false;
    const text = phase(job);
    if (this.mark.textContent !== text) this.mark.replaceChildren(phaseMark(text));
    this.#showButtons(job);
    const changing = job.changing === null ? [] : [`Changing ${job.changing}.`];
    say(this.message, [job.message.split("\n", 1)[0], ...changing].join(" · "));
    this.#figures(job);
    this.#facts(job);
    this.#curves(job);
    this.#order(text);
    this.attempts.update([...job.attempts].reverse());
    this.conditions.update([...job.conditions].sort((a, b) => b.time - a.time));
  }

  #showButtons(job) {
    const none = job.ended_at !== null || !this.live.manages(job.spec.user);
    const kinds = none ? [] : [job.suspended ? "resume" : "suspend", "cancel"];
    if (this.buttons.told === kinds.join()) return;
    this.buttons.told = kinds.join();
    this.buttons.replaceChildren(...kinds.map((kind) => actionButton(kind, this.name, () => this.update())));
  }

  #figures(job) {
    const point = job.points.at(-1) ?? {};
    const stages = job.running_stages ?? job.num_stages;
    const nodes = job.running_on.length ? job.running_on : job.assigned;
    const holds = !job.ended_at && nodes.length;
    const efficiency = point.efficiency == null ? "" : `, ${Math.round(100 * point.efficiency)} % efficient`;
    this.tiles.update({
      Has: holds ? [`${nodes.length}×${stages}`, places(nodes)] : ["nothing"],
      Epoch: [epochs(point.epoch, point.num_epochs, job.phase), point.step ? `step ${thousands(point.step)}` : ""],
      Loss: [number(point.loss)],
      Goodput: [number(point.goodput), point.goodput == null ? "" : `samples/s${efficiency}`],
      "Batch size": [point.batch_size ? thousands(point.batch_size) : DASH, split(point)],
      Restarts: [job.num_restarts, job.num_resizes ? `and ${count(job.num_resizes, "elastic resize")}` : ""],
    });
  }

  /** Show the job's forecast, owner, program and GPUs. */
  #facts({ spec, forecast, devices, synchronization }) {
    const starts = forecast?.start ? between(forecast.start) : null;
    const gpus = devices.map((one) => `${one.node}: ${deviceLine(one)}`).join("; ");
    const facts = { Starts: starts, Ends: forecast ? between(forecast.end) : null, "Forecast note": forecast?.note, Owner: spec.user, Team: spec.team, Priority: spec.priority, Image: spec.image, Script: spec.script, Arguments: spec.args.map(quoted).join(" "), GPUs: gpus, Synchronization: synchronization };
    const known = Object.entries(facts).filter(([, value]) => value);
    const text = JSON.stringify(known);
    if (this.facts.told === text) return;
    this.facts.told = text;
    this.facts.replaceChildren(...known.map(([title, value]) => h("div", {}, h("dt", {}, title), h("dd", CODE.has(title) ? { class: "code" } : {}, value))));
  }

  /** Put the log of a failed job first, because it has the reason. */
  #order(text) {
    const failed = text === "Failed";
    if (this.failed === failed) return;
    this.failed = failed;
    if (failed) this.progress.before(this.log);
    else this.body.firstChild.append(this.log);
  }

  /** Hide charts without values after the end of the job. */
  #hideEmpty(job) {
    const charts = Object.values(this.charts).filter((chart) => chart !== this.charts.slots);
    for (const chart of charts) chart.element.hidden = chart.empty && job.ended_at !== null;
    this.silence.hidden = !charts.every((chart) => chart.element.hidden);
    this.key.hidden = job.attempts.length < 2;
  }

  #curves(job) {
    const { attempts, points } = job;
    const reported = points.map((one) => one.time);
    const begin = Math.min(...attempts.map((one) => one.created_at), ...reported, this.live.now);
    // A node's clock may be ahead of the scheduler's; include its reports.
    const end = Math.max(job.ended_at ?? Math.max(this.live.now, begin + 10), ...reported);
    const marks = attempts.slice(1).map((one) => ({ at: one.created_at, label: titled(one), elastic: one.membership > 1 }));
    const shape = { from: begin, to: end, marks };
    const { goodput, loss, step, batch, noise, slots } = this.charts;
    goodput.update([byTime(points, "goodput")], shape);
    loss.update([byTime(points, "loss")], shape);
    step.update([byTime(points, "step_time"), byTime(points, "predicted_step_time")], shape);
    batch.update([byTime(points, "batch_size")], shape);
    noise.update([byTime(job.noise, "noise_scale")], shape);
    slots.update([held(attempts, end)], { ...shape, marks: [] });
    this.#hideEmpty(job);
  }

  async #askMore(job) {
    const [why, logs] = await Promise.all([
      ask(`${this.path}/explanation`),
      job.attempt ? ask(`${this.path}/logs?tail=${LINES}&attempt=${job.attempt}`) : [],
    ]);
    const text = JSON.stringify(why);
    if (this.why.told !== text) this.why.replaceChildren(...explanation(why));
    this.why.told = text;
    this.logs = logs;
    const titles = logs.map((log) => `replica ${log.replica} of attempt ${log.attempt}`);
    if (this.which.told !== titles.join()) {
      const chosen = Math.max(this.which.selectedIndex, 0);
      this.which.replaceChildren(...titles.map((title) => h("option", {}, title)));
      this.which.selectedIndex = Math.min(chosen, titles.length - 1);
      this.which.told = titles.join();
    }
    this.which.hidden = titles.length === 0;
    this.#showLog();
  }

  #showLog() {
    const atEnd = this.lines.scrollHeight - this.lines.scrollTop - this.lines.clientHeight < 30;
    say(this.lines, this.logs[this.which.selectedIndex]?.lines.join("\n") || "No output yet.");
    if (atEnd) this.lines.scrollTop = this.lines.scrollHeight;
  }
}

/** Return a shell-quoted argument. */
function quoted(text) {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

/** Return the parts of a batch: 2 × 32, 2 × 32 × (1 + 1). */
function split(point) {
  if (!point.batch_size) return "";
  const times = point.accum_steps ? ` × (${point.accum_steps} + 1)` : "";
  return `${point.num_replicas} × ${point.atomic_bsz}${times}`;
}

/** Return the slots of a job over time: [[time, slots], …], 0 between attempts. */
function held(attempts, end) {
  const found = [];
  for (const one of attempts) {
    const last = found.at(-1);
    if (last && one.created_at <= last[0]) found.pop();
    found.push([one.created_at, one.nodes.length * one.num_stages]);
    if (one.ended_at !== null) found.push([one.ended_at, 0]);
  }
  if (found.length && found.at(-1)[0] < end) found.push([end, found.at(-1)[1]]);
  return found;
}

const ATTEMPTS = [
  { title: "Attempt", head: true, text: (one) => `${one.attempt}${one.membership > 1 ? `, membership ${one.membership}` : ""}` },
  { title: "Created", kind: "short", text: (one) => moment(one.created_at) },
  { title: "R×K", kind: "n", text: (one) => `${one.nodes.length}×${one.num_stages}` },
  { title: "Nodes", text: (one) => places(one.nodes), fill: fillPlaces },
  { title: "To first step", kind: "n short", text: (one) => (one.first_step_at === null || one.membership > 1 ? DASH : seconds(one.first_step_at - one.created_at)) },
  { title: "Restart or pause", kind: "n short", text: (one) => seconds(one.restart_seconds ?? one.pause_seconds) },
  { title: "Ran for", kind: "n short", text: (one) => (one.ended_at === null ? "runs" : duration(one.ended_at - one.created_at)) },
  { title: "Ended", text: (one) => outcome(one) ?? DASH },
  { title: "Because", text: (one) => one.intent ?? DASH },
];

const CONDITIONS = [
  { title: "Condition", head: true, text: (one) => one.type },
  { title: "Status", text: (one) => (one.status ? "true" : "false") },
  { title: "Since", kind: "short", text: (one) => moment(one.time) },
  { title: "Reason", text: (one) => one.reason },
  { title: "Message", kind: "words lines", text: (one) => one.message },
];

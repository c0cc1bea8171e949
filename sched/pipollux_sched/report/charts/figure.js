// Base of all charts: they resize, zoom, and can be read with pointer and keys.

import { colour, h, s } from "./dom.js";
import { Hover, onWidth } from "./hover.js";

const DRAG = 8; // units that the pointer moves before it selects a range instead of an item
const LEAST = 1e-6; // smallest share of the whole to zoom into

/**
 * A chart. A subclass provides its whole extent, draws it, and lists the items that the arrow keys
 * visit: `whole()` → [low, high], `draw()`, `things()`, `at(thing)` → x, `tell(thing)` → lines
 * of the tooltip, `mark(thing)`, and `open(thing)` for Enter and a click.
 *
 * Dragging zooms into a range of the horizontal axis; a double click, Escape or the button resets it.
 */
export class Figure {
  constructor(kind, { zooms = true } = {}) {
    addHatches();
    this.plot = h("div", { class: `plot ${kind}`, tabindex: 0, role: "img" });
    this.hover = new Hover();
    this.range = h("div", { class: "range", hidden: true });
    this.reset = h("button", { type: "button", class: "reset", hidden: true, click: () => this.zoom(null) }, "show all");
    this.canvas = h("div", { class: "canvas" }, this.plot, this.range, this.reset, this.hover.element);
    this.element = this.canvas;
    this.zoomed = null;
    this.selected = null;
    this.width = 0;
    this.drag = null;
    onWidth(this.canvas, (width) => {
      this.width = width;
      this.draw();
    });
    const listen = (name, listener) => this.plot.addEventListener(name, listener);
    listen("pointermove", (event) => this.#move(event));
    listen("pointerleave", () => this.drag || this.select(null));
    listen("blur", () => this.select(null));
    listen("keydown", (event) => this.#key(event));
    listen("click", (event) => this.#click(event));
    if (!zooms) return;
    listen("pointerdown", (event) => this.#press(event));
    listen("pointerup", (event) => this.#release(event));
    listen("pointercancel", () => this.#end());
    listen("dblclick", () => this.zoom(null));
  }

  /** The visible range of the axis. */
  get domain() {
    return this.zoomed ?? this.whole();
  }

  /** Show a range; null: all. */
  zoom(domain) {
    const [low, high] = this.whole();
    const part = domain && [Math.max(domain[0], low), Math.min(domain[1], high)];
    this.zoomed = part && part[1] - part[0] > (high - low) * LEAST ? part : null;
    this.reset.hidden = !this.zoomed;
    this.draw();
  }

  /** Insert a drawing of the library; it uses our style sheet, as the page allows no other. */
  place(...drawings) {
    for (const drawing of drawings) {
      drawing.querySelector("style")?.remove();
      drawing.setAttribute("aria-hidden", "true"); // the element around it has the label
    }
    this.plot.replaceChildren(...drawings);
    this.scale = drawings.at(-1).scale("x");
  }

  /** Show the tooltip of an item, beside the pointer or the item; null: hide it. */
  select(thing, event = null) {
    this.selected = thing;
    this.mark(thing);
    if (thing === null) return this.hover.hide();
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = event ? [event.clientX - box.left, event.clientY - box.top + 16] : [this.scale.apply(this.at(thing)), 8];
    return this.hover.show(Math.max(0, Math.min(x, this.width)), y, this.tell(thing));
  }

  open() {}

  #x(event) {
    return event.clientX - this.canvas.getBoundingClientRect().left;
  }

  #move(event) {
    if (this.drag === null || Math.abs(this.#x(event) - this.drag) < DRAG) {
      return this.select(this.under(event, this.#x(event)), event);
    }
    this.select(null);
    const ends = [this.drag, this.#x(event)].sort((a, b) => a - b);
    this.range.hidden = false;
    this.range.style.left = `${ends[0]}px`;
    this.range.style.width = `${ends[1] - ends[0]}px`;
    return undefined;
  }

  #press(event) {
    if (event.button !== 0 || event.pointerType === "touch") return;
    this.drag = this.#x(event);
    event.preventDefault(); // so that no text is selected on the way
    this.plot.focus({ preventScroll: true });
    this.plot.setPointerCapture(event.pointerId);
  }

  #release(event) {
    const from = this.drag;
    this.dragged = from !== null && Math.abs(this.#x(event) - from) >= DRAG;
    this.#end();
    if (this.dragged) this.zoom([from, this.#x(event)].map((x) => this.scale.invert(x)).sort((a, b) => a - b));
  }

  #end() {
    this.drag = null;
    this.range.hidden = true;
  }

  #click(event) {
    const thing = this.dragged ? null : this.under(event, this.#x(event));
    if (thing !== null) this.open(thing);
  }

  #key(event) {
    const things = this.things();
    if (event.key === "Escape") return this.selected === null ? this.zoom(null) : this.select(null);
    if (event.key === "Enter") return this.selected === null ? undefined : this.open(this.selected);
    if ("+-".includes(event.key)) return this.#closer(event.key === "+" ? 0.5 : 2);
    const found = things.indexOf(this.selected);
    const now = found < 0 ? things.length : found;
    const leap = Math.max(Math.floor(things.length / 10), 1);
    const to = { ArrowLeft: now - 1, ArrowRight: now + 1, PageUp: now - leap, PageDown: now + leap, Home: 0, End: things.length - 1 }[event.key];
    if (to === undefined || !things.length) return undefined;
    event.preventDefault();
    return this.select(things[Math.max(0, Math.min(to, things.length - 1))]);
  }

  /** Zoom around the selected item, or the middle. */
  #closer(factor) {
    const [low, high] = this.domain;
    const middle = this.selected === null ? (low + high) / 2 : this.at(this.selected);
    this.zoom([middle - (middle - low) * factor, middle + (high - middle) * factor]);
  }
}

const pen = document.createElement("canvas").getContext("2d");

/** Return the width of a text. */
export function textWidth(words, size = 13, weight = 400) {
  pen.font = `${weight} ${size}px "Helvetica Neue", "Segoe UI", system-ui, "DejaVu Sans", Arial, sans-serif`;
  return pen.measureText(words).width;
}

/** The hatch patterns in the colours of jobs: once in the page, for all charts. */
function addHatches() {
  if (document.getElementById("hatch-0")) return;
  document.body.append(s("svg", { class: "hatches", "aria-hidden": "true" }, Array.from({ length: 8 }, (_, number) =>
    s("pattern", { id: `hatch-${number}`, class: colour(number + 1), width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      s("rect", { class: "hatch-ground", width: 6, height: 6 }),
      s("rect", { class: "hatch-line", width: 1.6, height: 6 })))));
}

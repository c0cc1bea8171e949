// The box beside the pointer, or beside what the arrow keys have reached, that says what is there.

import { h } from "./dom.js";

/** A box inside a figure; `show` puts lines of text at a place, [label, value] as two columns. */
export class Hover {
  element = h("div", { class: "hover", hidden: true, role: "status" });

  show(x, y, lines) {
    const rows = lines.map((line) =>
      Array.isArray(line)
        ? h("div", { class: "hover-row" }, h("span", {}, line[0]), h("b", {}, line[1]))
        : h("div", { class: "hover-head" }, line),
    );
    this.element.replaceChildren(...rows);
    this.element.hidden = false;
    const room = this.element.parentElement.clientWidth;
    const width = this.element.offsetWidth;
    const left = x + 14 + width > room ? x - 14 - width : x + 14;
    this.element.style.left = `${Math.max(0, Math.min(left, room - width))}px`;
    this.element.style.top = `${Math.max(y, 0)}px`;
  }

  hide() {
    this.element.hidden = true;
  }
}

/** Call `draw(width)` when an element has got its width, and whenever that changes. */
export function onWidth(element, draw) {
  let last = 0;
  new ResizeObserver(([entry]) => {
    const width = Math.floor(entry.contentRect.width);
    if (width > 0 && width !== last) draw((last = width));
  }).observe(element);
}

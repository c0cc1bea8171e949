// The tooltip beside the pointer, or beside the item selected with the arrow keys.

import { h } from "./dom.js";

/** A tooltip in a figure; `show` puts lines of text at a position, [label, value] as two columns. */
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

/** Call `draw(width)` once an element has its width, and whenever it changes. */
export function onWidth(element, draw) {
  let last = 0;
  new ResizeObserver(([entry]) => {
    const width = Math.floor(entry.contentRect.width);
    if (width > 0 && width !== last) draw((last = width));
  }).observe(element);
}

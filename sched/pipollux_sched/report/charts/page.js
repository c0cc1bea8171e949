// The charts of a page that contains their data: each is drawn in the element of its name.

import { h } from "./dom.js";
import { Curves } from "./curves.js";
import { Scatter } from "./scatter.js";
import { Timeline } from "./timeline.js";

const KINDS = { curves: Curves, scatter: Scatter, timeline: Timeline };

const charts = JSON.parse(document.getElementById("charts").textContent);
for (const place of document.querySelectorAll("[data-chart]")) {
  try {
    const { kind, ...spec } = charts[place.dataset.chart];
    place.replaceChildren(new KINDS[kind](spec).element);
  } catch (error) {
    place.replaceChildren(h("p", { class: "note" }, "This picture could not be drawn."));
    console.error(error);
  }
}

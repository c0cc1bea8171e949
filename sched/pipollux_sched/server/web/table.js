// Tables that update only changed cells, so that focus and selection last.

import { h, say } from "./dom.js";
import { DASH } from "./format.js";

/**
 * A table with a row for each of a list of things, in its order.
 *
 * columns: [{ title, text(thing), order?, fill(cell, thing, text)?, kind? }]; `text` returns what the
 * cell holds, `fill` renders more than text, and is called when the text has changed. The head
 * of a column with an `order` is a link to `href(column)`, which sorts by it. On narrow screens each
 * row is a card of titles and values; its ARIA roles still mark it as a table.
 */
export class Table {
  constructor(columns, { key, most = Infinity, href = null, none = "" }) {
    Object.assign(this, { columns, key, most, href, none });
    this.rows = new Map();
    this.body = h("tbody", { role: "rowgroup" });
    this.heads = columns.map((column) => this.#head(column));
    this.note = h("p", { class: "note", hidden: true });
    this.element = h("div", { class: "wide" },
      h("table", { role: "table" }, h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, ...this.heads)), this.body), this.note);
  }

  update(things) {
    const shown = things.slice(0, this.most);
    const wanted = shown.map((thing) => this.#row(thing));
    wanted.forEach((row, i) => {
      if (this.body.children[i] !== row) this.body.insertBefore(row, this.body.children[i] ?? null);
    });
    const kept = new Set(shown.map(this.key));
    for (const [key, row] of this.rows) {
      if (!kept.has(key)) {
        row.remove();
        this.rows.delete(key);
      }
    }
    const more = things.length - shown.length;
    this.note.hidden = more === 0 && things.length > 0;
    say(this.note, more ? `and ${more} more` : this.none);
  }

  /** Mark the column by which the rows are sorted. */
  mark(order, descending) {
    this.columns.forEach((column, i) => {
      if (!column.order) return;
      const head = this.heads[i];
      if (column.order === order) head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
      head.firstChild.setAttribute("href", this.href(column));
    });
  }

  #head(column) {
    const inside = column.order ? h("a", { class: "sort" }, column.title) : column.title;
    return h("th", { class: column.kind ?? "", scope: "col", role: "columnheader" }, inside);
  }

  #row(thing) {
    const key = this.key(thing);
    let row = this.rows.get(key);
    if (!row) {
      row = h("tr", { role: "row" }, ...this.columns.map(cell));
      this.rows.set(key, row);
    }
    this.columns.forEach((column, i) => {
      const cell = row.children[i];
      const text = column.text(thing);
      if (cell.told === text) return;
      cell.told = text;
      cell.classList.toggle("nothing", text === DASH || text === "");
      if (column.fill) column.fill(cell, thing, text);
      else cell.textContent = text;
    });
    return row;
  }
}

function cell(column) {
  const attributes = { class: column.kind ?? "", "data-title": column.title };
  return column.head
    ? h("th", { ...attributes, scope: "row", role: "rowheader" })
    : h("td", { ...attributes, role: "cell" });
}

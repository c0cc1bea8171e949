// Tables that stay as they are where nothing has changed, so that focus and selection last.

import { h, say } from "./dom.js";

/**
 * A table with a row for each of a list of things.
 *
 * columns: [{ title, text(thing), sort(thing)?, fill(cell, thing)?, kind? }]; `text` says what the
 * cell holds, `fill` makes more of it than text, and is called when the text has changed.
 */
export class Table {
  constructor(columns, { key, most = Infinity, order = null, none = "" }) {
    Object.assign(this, { columns, key, most, order, none });
    this.rows = new Map();
    this.things = [];
    this.body = h("tbody");
    this.heads = columns.map((column) => this.#head(column));
    this.note = h("p", { class: "note", hidden: true });
    this.element = h("div", { class: "wide" },
      h("table", {}, h("thead", {}, h("tr", {}, ...this.heads)), this.body), this.note);
  }

  update(things) {
    this.things = things;
    const sorted = this.#sorted();
    const shown = sorted.slice(0, this.most);
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
    const more = sorted.length - shown.length;
    this.note.hidden = more === 0 && sorted.length > 0;
    say(this.note, more ? `and ${more} more; the filter finds them` : this.none);
  }

  #head(column) {
    const kind = column.kind ?? "";
    if (!column.sort) return h("th", { class: kind, scope: "col" }, column.title);
    const button = h("button", { type: "button", class: "sort", click: () => this.#sortBy(column) }, column.title);
    return h("th", { class: kind, scope: "col" }, button);
  }

  #sortBy(column) {
    const again = this.order?.column === column;
    this.order = { column, down: again ? !this.order.down : Boolean(column.down) };
    this.heads.forEach((head, i) => {
      if (this.columns[i] === column) head.setAttribute("aria-sort", this.order.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    this.update(this.things);
  }

  #sorted() {
    if (!this.order?.column) return this.things;
    const { column, down } = this.order;
    const of = (thing) => column.sort(thing);
    // What is not known comes last, whichever way.
    return [...this.things].sort((a, b) => {
      const [left, right] = [of(a), of(b)];
      const unknown = (value) => value === null || value === undefined;
      if (unknown(left) || unknown(right)) return unknown(left) - unknown(right);
      const order = left < right ? -1 : left > right ? 1 : 0;
      return down ? -order : order;
    });
  }

  #row(thing) {
    const key = this.key(thing);
    let row = this.rows.get(key);
    if (!row) {
      row = h("tr", {}, ...this.columns.map((column) =>
        h(column.head ? "th" : "td", { class: column.kind ?? "", scope: column.head ? "row" : null })));
      this.rows.set(key, row);
    }
    this.columns.forEach((column, i) => {
      const cell = row.children[i];
      const text = column.text(thing);
      if (cell.told === text) return;
      cell.told = text;
      if (column.fill) column.fill(cell, thing, text);
      else cell.textContent = text;
    });
    return row;
  }
}

// A table that is updated each second without losing focus, order or selection.

import { h, put, Keyed } from "./dom.js";
import { plural } from "./format.js";

const ROWS_MAX = 200;
const CUT_CHARS = 20;

export class Table {
  /**
   * `columns`: [{title, value(row), text(row), fill(cell, row), number, hint}]. `value` returns the sort key; a column
   * without it cannot be sorted. `fill` writes other content than text into a cell. `key(row)` identifies a row.
   */
  constructor({ caption, columns, key, sort = null, descending = false, empty = "Nothing.", what = "row" }) {
    Object.assign(this, { columns, key, sort, descending, what });
    this.items = [];
    this.heads = columns.map((column) => this.head(column));
    this.body = h("tbody");
    this.note = h("p", { className: "quiet" });
    this.empty = empty;
    this.table = h("table", {}, h("caption", { className: "hidden" }, caption), h("thead", {}, h("tr", {}, this.heads)), this.body);
    this.element = h("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": caption }, this.table, this.note);
    this.rows = new Keyed(this.body, () => this.row());
  }

  head(column) {
    const cell = h("th", { scope: "col", className: column.number ? "number" : "", title: column.hint });
    if (column.value && this.sort !== null) {
      cell.append(h("button", { type: "button", onclick: () => this.order(column) }, column.title));
    } else {
      cell.append(column.title);
    }
    return cell;
  }

  order(column) {
    this.descending = this.sort === column.title ? !this.descending : Boolean(column.number);
    this.sort = column.title;
    this.update(this.items);
  }

  row() {
    const cells = this.columns.map((column, at) =>
      at === 0 ? h("th", { scope: "row" }) : h("td", { className: column.number ? "number" : "" }));
    return { element: h("tr", {}, cells), cells };
  }

  update(items, more = 0) {
    this.items = items;
    const shown = this.sorted(items).slice(0, ROWS_MAX);
    this.rows.update(shown, this.key, (row, item) => {
      this.columns.forEach((column, at) => {
        if (column.fill) column.fill(row.cells[at], item);
        else write(row.cells[at], column.text(item));
      });
    });
    this.columns.forEach((column, at) => {
      const state = column.title === this.sort ? (this.descending ? "descending" : "ascending") : null;
      if (state) this.heads[at].setAttribute("aria-sort", state);
      else this.heads[at].removeAttribute("aria-sort");
    });
    const left = items.length - shown.length + more;
    put(this.note, items.length === 0 ? this.empty : left > 0 ? `${plural(left, `more ${this.what}`)} not shown.` : "");
  }

  sorted(items) {
    const column = this.columns.find((one) => one.title === this.sort);
    if (!column) return items;
    const sign = this.descending ? -1 : 1;
    const missing = (value) => value === null || value === undefined || Number.isNaN(value);
    return [...items].sort((one, other) => {
      const [a, b] = [column.value(one), column.value(other)];
      if (missing(a) || missing(b)) return Number(missing(a)) - Number(missing(b));
      return sign * (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
    });
  }
}

/** Writes a text. A long text is the hint too, because the cell may cut it. */
function write(cell, text) {
  put(cell, text);
  const hint = String(text).length > CUT_CHARS ? text : "";
  if (cell.title !== hint) cell.title = hint;
}

/** Writes a link into a cell, and reuses its element. */
export function link(cell, text, href) {
  let found = cell.firstElementChild;
  if (!found) {
    found = h("a");
    cell.append(found);
  }
  put(found, text);
  if (found.getAttribute("href") !== href) found.setAttribute("href", href);
}

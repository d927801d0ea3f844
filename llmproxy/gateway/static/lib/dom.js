// Elements without markup: every text of others becomes a text node, never HTML.

/** An element. `props` are its properties, attributes (with a dash, `role`, `for`, `scope`), and `on...` listeners. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && !name.includes("-") && name !== "role" && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

/** Sets a text only where it differs, so that selections and screen readers are left alone. */
export function put(element, text) {
  const shown = String(text);
  if (element.textContent !== shown) element.textContent = shown;
}

/** The child that `make` built for this key, in the order of the keys; children of other keys are removed. */
export class Keyed {
  constructor(host, make) {
    this.host = host;
    this.make = make;
    this.children = new Map();
  }

  update(items, keyOf, change) {
    const seen = new Set();
    let before = this.host.firstChild;
    for (const item of items) {
      const key = keyOf(item);
      if (seen.has(key)) continue;
      seen.add(key);
      let child = this.children.get(key);
      if (child === undefined) {
        child = this.make(item);
        this.children.set(key, child);
      }
      change(child, item);
      const element = child.element ?? child;
      if (element === before) before = before.nextSibling;
      else this.host.insertBefore(element, before);
    }
    for (const [key, child] of this.children) {
      if (!seen.has(key)) {
        (child.element ?? child).remove();
        this.children.delete(key);
      }
    }
  }
}

/** A bar from 0 to 1 with a mark for each limit; the number beside it is what screen readers read. */
export function bar() {
  const fill = h("span", { className: "fill" });
  const element = h("span", { className: "meter", "aria-hidden": "true" }, fill);
  return {
    element,
    set(share, marks = [], style = "") {
      fill.style.width = `${Math.min(1, Math.max(0, share ?? 0)) * 100}%`;
      if (fill.className !== `fill ${style}`) fill.className = `fill ${style}`;
      while (element.children.length - 1 < marks.length) element.append(h("span", { className: "mark" }));
      while (element.children.length - 1 > marks.length) element.lastChild.remove();
      marks.forEach((mark, at) => {
        const one = element.children[at + 1];
        one.style.left = `calc(${Math.min(1, mark.at) * 100}% - 1px)`;
        one.className = `mark ${mark.style ?? ""}`;
      });
    },
  };
}

/** Writes a bar and its number into a cell of a table. */
export function putMeter(cell, share, text, style = "", marks = []) {
  if (!cell.meter) {
    cell.meter = bar();
    cell.shown = h("span", { className: "meter-text" });
    cell.append(h("span", { className: "with-meter" }, cell.meter.element, cell.shown));
  }
  cell.meter.set(share, marks, style);
  put(cell.shown, text);
}

/** A section with a heading. */
export function card(title, ...children) {
  return h("section", { className: "card" }, h("h2", {}, title), ...children);
}

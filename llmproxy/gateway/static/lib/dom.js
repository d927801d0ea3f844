// Makes elements without markup: foreign text becomes a text node, never HTML.

/** Makes an element. `props` are `on...` listeners, properties of the element, and otherwise attributes. */
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

/** Sets a text only if it differs, which keeps selections and does not disturb screen readers. */
export function put(element, text) {
  const shown = String(text);
  if (element.textContent !== shown) element.textContent = shown;
}

/** Keeps one child element for each key, made by `make`, in the order of the items. */
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

/** A bar from 0 to 1 with marks. Screen readers read the number beside it instead. */
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

// What happened: log lines about the state of the proxy and its fleet.

import { card, h, Keyed, put } from "../lib/dom.js";
import { clock } from "../lib/format.js";

export class EventList {
  /** The newest `limit` events; each leads to its place in the view of time. */
  constructor(host, limit) {
    this.limit = limit;
    this.list = h("ol", { className: "events" });
    this.empty = h("p", { className: "quiet" }, "Nothing happened yet.");
    this.element = card("Events, the newest first", this.list, this.empty);
    host.append(this.element);
    this.rows = new Keyed(this.list, () => {
      const parts = { time: h("a"), name: h("strong"), text: h("span") };
      parts.element = h("li", {}, parts.time, " ", parts.name, " ", parts.text);
      return parts;
    });
  }

  update(store) {
    const newest = [...store.events()].reverse().slice(0, this.limit);
    this.empty.hidden = newest.length > 0;
    this.rows.update(newest, (event) => event.serial, (parts, event) => {
      const at = event.at_s + store.offset;
      parts.element.dataset.level = event.level;
      put(parts.time, clock(at));
      parts.time.setAttribute("href", `#time/${Math.round(at)}`);
      put(parts.name, event.event);
      put(parts.text, event.text);
    });
  }
}

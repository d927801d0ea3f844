// The list of events: log lines about the state of the proxy and its fleet.

import { card, h, Keyed, put } from "../lib/dom.js";
import { clock } from "../lib/format.js";

export class EventList {
  /** Shows the newest `limit` events. Each links to its moment in the view Time. */
  constructor(host, limit) {
    this.limit = limit;
    this.list = h("ol", { className: "events" });
    this.empty = h("p", { className: "quiet" });
    this.element = card("Events, the newest first", this.list, this.empty);
    host.append(this.element);
    this.moment = null;
    this.rows = new Keyed(this.list, () => {
      const parts = { time: h("a"), name: h("strong"), text: h("span") };
      parts.element = h("li", {}, parts.time, " ", parts.name, " ", parts.text);
      return parts;
    });
  }

  /** `window` has the first and the last Unix time to show; null for all. */
  update(store, window = null) {
    const inside = ({ at_s }) => window === null || (at_s + store.offset >= window[0] && at_s + store.offset <= window[1]);
    const newest = [...store.events()].reverse().filter(inside).slice(0, this.limit);
    put(this.empty, window === null ? "Nothing happened yet." : "Nothing happened in this time.");
    this.empty.hidden = newest.length > 0;
    const asked = nearest(newest, store.moment - store.offset);
    this.rows.update(newest, (event) => event.serial, (parts, event) => {
      const at = event.at_s + store.offset;
      parts.element.dataset.level = event.level;
      put(parts.time, clock(at));
      parts.time.setAttribute("href", `#time/${at.toFixed(3)}`);
      put(parts.name, event.event);
      put(parts.text, event.text);
      if (store.moment !== null && event === asked) parts.element.setAttribute("aria-current", "time");
      else parts.element.removeAttribute("aria-current");
    });
    if (store.moment === this.moment || (store.moment !== null && asked === undefined)) return;
    this.moment = store.moment;
    const row = this.list.querySelector("[aria-current]");
    if (row) this.list.scrollTop = row.offsetTop - this.list.offsetTop - (this.list.clientHeight - row.offsetHeight) / 2;
  }
}

/** The event nearest to a time of the proxy's clock. The earlier one of two equally near events. */
function nearest(events, at_s) {
  const away = (event) => Math.abs(event.at_s - at_s);
  return events.reduce((found, one) => (found === undefined || away(one) <= away(found) ? one : found), undefined);
}

// What is in force, and where each value came from.

import { json } from "../lib/client.js";
import { card, h, put } from "../lib/dom.js";
import { clock } from "../lib/format.js";
import { Table } from "../lib/table.js";
import { asking } from "./requests.js";

export const configuration = { title: "Configuration", columns: [], open };

const RELOADS = ["reloaded", "not_reloaded"];

function open(host, store) {
  const table = new Table({
    caption: "Settings in force", key: (one) => one.key, sort: "", empty: "No setting fits.", what: "setting",
    columns: [
      { title: "Setting", value: (one) => one.key, text: (one) => one.key },
      { title: "Value", text: (one) => one.value },
      { title: "From", value: (one) => one.origin, fill: origin },
      { title: "Changes", value: (one) => String(one.restart), text: (one) => (one.restart ? "at a restart" : "at a reload") },
    ],
  });
  let settings = [];
  let more = 0;
  const find = h("input", { id: "find", type: "search", placeholder: "part of a name, value or file", spellcheck: false, autocomplete: "off", oninput: () => show() });
  const changed = h("input", { id: "changed", type: "checkbox", onchange: () => show() });
  const said = h("p", { className: "quiet", role: "status" });
  const last = h("p");
  const show = () => {
    const text = find.value.trim().toLowerCase();
    table.update(settings.filter((one) => (!changed.checked || one.origin !== "default") && `${one.key} ${one.value} ${one.origin}`.toLowerCase().includes(text)), more);
  };
  host.append(card("Settings in force", last, h("form", { className: "filters", onsubmit: (event) => event.preventDefault() },
    h("label", { htmlFor: "find" }, "Find"), find, h("span", {}, changed, h("label", { htmlFor: "changed" }, "only what is not the default"))), said, table.element));
  const poll = asking(store, () => json("/debug/config"), (found) => {
    settings = found.settings;
    more = found.more;
    show();
  }, (text) => put(said, text));
  return {
    update(now) {
      const reload = [...now.events()].reverse().find((event) => RELOADS.includes(event.event));
      put(last, reload ? `Last reload: ${clock(reload.at_s + now.offset)} ${reload.event} ${reload.text}` : "It was not reloaded since it started.");
      return poll.update();
    },
  };
}

function origin(cell, one) {
  put(cell, one.origin);
  cell.classList.toggle("quiet", one.origin === "default");
}

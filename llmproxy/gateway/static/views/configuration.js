// The settings in force, and the source of each value.

import { polling } from "../lib/polling.js";
import { json } from "../lib/client.js";
import { card, h, Keyed, put } from "../lib/dom.js";
import { clock } from "../lib/format.js";
import { Table } from "../lib/table.js";

export const configuration = { title: "Configuration", columns: [], open };

const RELOADS = ["reloaded", "reload_failed"];
const CHANGES = { config_changed: "In force", needs_a_restart: "Needs a restart" };

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
  const changes = h("ul", { className: "plain", id: "reload" });
  const lists = new Keyed(changes, () => h("li"));
  const show = () => {
    const text = find.value.trim().toLowerCase();
    table.update(settings.filter((one) => (!changed.checked || one.origin !== "default") && `${one.key} ${one.value} ${one.origin}`.toLowerCase().includes(text)), more);
  };
  host.append(card("Settings in force", last, changes, h("form", { className: "filters", onsubmit: (event) => event.preventDefault() },
    h("label", { htmlFor: "find" }, "Find"), find, h("span", {}, changed, h("label", { htmlFor: "changed" }, "only settings that differ from the default"))), said, table.element));
  const poll = polling(store, () => json("/debug/config"), (found) => {
    settings = found.settings;
    more = found.more;
    show();
  }, (text) => put(said, text));
  return {
    update(now) {
      const [when, lines] = lastReload([...now.events()]);
      put(last, when === null ? "No reload since the start." : `Last reload, at ${clock(when + now.offset)}:`);
      lists.update(lines, (line) => line, put);
      return poll.update();
    },
  };
}

/** A field at the end of a log line. */
const fieldOf = ({ text }, name) => text.split(`${name}=`).slice(1).join(`${name}=`).replace(/^"|"$/g, "") || text;

/** The time of the last reload and its result: the log lines since the reload before. */
function lastReload(events) {
  const ends = events.filter((event) => RELOADS.includes(event.event)).map((event) => events.indexOf(event));
  if (ends.length === 0) return [null, []];
  const end = events[ends.at(-1)];
  if (end.event === "reload_failed") {
    const problems = events.filter((event) => event.event === end.event && end.at_s - event.at_s < 1);
    return [end.at_s, problems.map((event) => `Refused; the previous settings stay in force: ${fieldOf(event, "problem")}`)];
  }
  const changes = events.slice((ends.at(-2) ?? -1) + 1, ends.at(-1)).filter((event) => event.event in CHANGES);
  return [end.at_s, changes.length ? changes.map((event) => `${CHANGES[event.event]}: ${fieldOf(event, "change")}`) : ["Nothing changed."]];
}

function origin(cell, one) {
  put(cell, one.origin);
  cell.classList.toggle("quiet", one.origin === "default");
}

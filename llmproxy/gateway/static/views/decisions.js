// The view of decisions: the last choices, with the price of every candidate replica.

import { polling } from "../lib/polling.js";
import { json } from "../lib/client.js";
import { card, h, put } from "../lib/dom.js";
import { priceCard, termList } from "./price.js";

export const decisions = { title: "Decisions", columns: [], open };

const SHOWN = 12;
const SEARCHED = 100;

function open(host, store) {
  const content = h("div");
  const said = h("p", { className: "quiet", role: "status" });
  const find = h("input", { id: "find", type: "search", placeholder: "request, model, tenant, outcome ...", spellcheck: false, autocomplete: "off", oninput: () => poll.now() });
  const fits = ({ request, model, chosen, ended }) => [request, model, chosen, ended?.tenant, ended?.flow, ended?.band, ended?.outcome].some((name) => (name ?? "").toLowerCase().includes(find.value.trim().toLowerCase()));
  host.append(card("The last choices of a replica, the newest first",
    h("p", { className: "quiet" }, "A price is the time that a choice costs this request and other requests, in seconds. The cheapest replica is chosen; prices within 5 ms count as equal. Point at a term for its meaning. Pause (p) to read."), h("form", { className: "filters", onsubmit: (event) => event.preventDefault() }, h("label", { htmlFor: "find" }, "Find"), find), termList(), said), content);
  const poll = polling(store, () => Promise.all([json("/debug/explain", { limit: find.value.trim() ? SEARCHED : SHOWN }), json("/debug/requests")]), ([found, { requests }]) => {
    const ends = new Map(requests.map((one) => [one.request_id, one]));
    const choices = found.pools.flatMap((pool) => pool.choices.map((choice) => ({ ...choice, pool: pool.pool, ended: ends.get(choice.request) }))).filter(fits).sort((one, other) => one.age_s - other.age_s);
    content.replaceChildren(...choices.slice(0, SHOWN).map(priceCard));
    const notes = found.pools.filter((pool) => pool.note).map((pool) => pool.note);
    put(said, choices.length ? "" : notes[0] ?? (find.value.trim() ? "None of the last choices fits." : "No request was placed yet."));
  }, (text) => text && put(said, text));
  return { update: () => poll.update() };
}

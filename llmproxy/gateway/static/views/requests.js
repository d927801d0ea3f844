// The view of requests: the last finished requests, and the whole course of one.

import { polling } from "../lib/polling.js";
import { json } from "../lib/client.js";
import { card, h, put } from "../lib/dom.js";
import { clock, count, duration } from "../lib/format.js";
import { link, Table } from "../lib/table.js";
import { story } from "./story.js";

export const requests = { title: "Requests", columns: [], open };

const FILTERS = ["kind", "band", "model", "tenant", "key", "client", "backend"];
const KINDS = ["completed", "refused", "failed", "cancelled", "client_error"];

function open(host, store, argument) {
  return argument ? story(host, store, argument) : list(host, store);
}

function list(host, store) {
  const find = h("input", { id: "find", type: "search", placeholder: "request id", spellcheck: false, autocomplete: "off" });
  const search = h("form", { className: "filters", onsubmit: (event) => {
    event.preventDefault();
    if (find.value.trim()) location.hash = `#requests/${encodeURIComponent(find.value.trim())}`;
  } }, h("label", { htmlFor: "find" }, "Story of"), find, h("button", { type: "submit", className: "main" }, "Show"));
  const inputs = Object.fromEntries(FILTERS.map((name) => [name, filter(name, () => poll.now())]));
  const said = h("p", { className: "quiet", role: "status" });
  const table = new Table({
    caption: "The last requests that ended", key: (one) => one.key, sort: "", what: "request",
    empty: "No request that fits has ended.",
    columns: [
      { title: "Request", fill: (cell, one) => link(cell, one.request_id, `#requests/${encodeURIComponent(one.request_id)}`) },
      { title: "Ended", value: (one) => one.ended_s, text: (one) => clock(one.ended_s + store.offset) },
      { title: "Outcome", value: (one) => one.outcome, fill: outcome },
      { title: "Band", value: (one) => one.band, text: (one) => one.band ?? "–" },
      { title: "Model", value: (one) => one.model, text: (one) => one.model ?? one.unknown_model ?? "–" },
      { title: "Flow", value: (one) => one.flow, text: (one) => one.tenant ?? one.flow ?? "–" },
      { title: "Client", value: (one) => one.client, text: (one) => one.client ?? "–", hint: "Address of the client" },
      { title: "Key", value: (one) => one.key, text: (one) => one.key ?? "–", hint: "Name of the key" },
      { title: "Replica", value: (one) => one.backend, text: (one) => one.backend ?? "–" },
      { title: "Attempts", number: true, value: (one) => one.attempts, text: (one) => count(one.attempts) },
      { title: "Waited", number: true, value: (one) => one.queue_wait_s, text: (one) => duration(one.queue_wait_s) },
      { title: "TTFT", number: true, value: (one) => one.ttft_s, text: (one) => duration(one.ttft_s) },
      { title: "Took", number: true, value: (one) => one.duration_s, text: (one) => duration(one.duration_s) },
      { title: "Prompt", number: true, value: (one) => one.prompt_tokens, text: (one) => count(one.prompt_tokens), hint: "Prompt tokens" },
      { title: "Cached", number: true, value: (one) => one.cached_tokens, text: (one) => count(one.cached_tokens), hint: "Prompt tokens that the replica had in its cache" },
      { title: "Output", number: true, value: (one) => one.output_tokens, text: (one) => count(one.output_tokens), hint: "Output tokens" },
    ],
  });
  const poll = polling(store, () => json("/debug/requests", Object.fromEntries(FILTERS.map((name) => [name, inputs[name].input.value]))), (found) => {
    found.requests.forEach((one) => {
      one.key = `${one.request_id}/${one.arrived_s}`;
      one.ended_s = found.now_s - one.ended_age_s;
    });
    table.update(found.requests, found.more);
  }, (text) => put(said, text));
  host.append(card("Requests that ended, the newest first", search,
    h("form", { className: "filters", onsubmit: (event) => event.preventDefault() }, FILTERS.map((name) => inputs[name].element)), said, table.element));
  return { update: ({ live }) => {
    inputs.band.offer(live.bands.map((band) => band.band));
    inputs.backend.offer(live.backends.map((one) => one.backend));
    inputs.model.offer([...new Set(live.backends.flatMap((one) => one.models))]);
    return poll.update();
  } };
}

/** A filter field. `offer` sets its suggestions. */
function filter(name, onchange) {
  const choices = h("datalist", { id: `${name}-choices` });
  const input = name === "kind"
    ? h("select", { id: `filter-${name}`, onchange }, h("option", { value: "" }, "any"), KINDS.map((kind) => h("option", { value: kind }, kind.replace("_", " "))))
    : h("input", { id: `filter-${name}`, list: choices.id, placeholder: "any", spellcheck: false, autocomplete: "off", onchange });
  let offered = "";
  const offer = (names) => {
    if (String(names) === offered) return;
    offered = String(names);
    choices.replaceChildren(...names.slice(0, 200).map((one) => h("option", { value: one })));
  };
  const words = { kind: "Outcome", backend: "Replica" }[name] ?? name[0].toUpperCase() + name.slice(1);
  return { element: h("span", {}, h("label", { htmlFor: input.id }, words), input, choices), input, offer };
}

function outcome(cell, one) {
  if (!cell.firstChild) cell.append(h("span", { className: "outcome" }));
  cell.firstChild.dataset.kind = one.kind;
  put(cell.firstChild, `${one.outcome} ${one.status ?? ""}`.trim());
}

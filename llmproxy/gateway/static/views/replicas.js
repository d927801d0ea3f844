// The view of replicas: load, state, pace and history.

import { polling } from "../lib/polling.js";
import { Chart, looks } from "../lib/chart.js";
import { json, LockedError, post, RefusedError, UnreachableError } from "../lib/client.js";
import { card, h, put, putMeter } from "../lib/dom.js";
import { clock, count, duration, factor, number, percent, plural } from "../lib/format.js";
import { Lanes } from "../lib/lanes.js";
import { Table } from "../lib/table.js";
import { scaleTable } from "./scale.js";

export const replicas = { title: "Replicas", columns: ["backend/"], open };

const RECENT_S = 300;
/** A replica is marked as slow from this factor on: equal replicas differ by less. */
const SLOW = 1.5;
const BEGINS = ["backend_ejected", "backend_down"];
const ENDS = ["backend_back", "backend_up"];

function open(host, store) {
  const table = replicaTable(store, true);
  const said = h("p", { className: "quiet", role: "status" });
  table.said = said;
  host.append(card("Replicas", h("p", { className: "quiet" }, "Marks in the bar of the load: the band of that colour is served up to the mark. Times, tokens and hits cover the last minute, even across a restart; paces are the current values of placement."), table.element, said));
  const lanes = new Lanes(host, store);
  const wants = scaleTable();
  host.append(card("Replicas wanted", wants.element));
  const poll = polling(store, () => json("/scale"), ({ pools }) => wants.update(pools), () => {});
  const plots = h("div", { className: "pair" });
  host.append(plots);
  const lines = (suffix) => (history) => history.names("backend/", `/${suffix}`).map((name, at) => ({ label: name, column: `backend/${name}/${suffix}`, ...looks(at) }));
  const charts = [
    new Chart(plots, store, { title: "Time to the first token", note: "Mean of the requests of the last minute, from the grant.", lines: lines("ttft_s"), write: duration, log: true }),
    new Chart(plots, store, { title: "Time per token", note: "Mean of the requests of the last minute, after the first token.", lines: lines("tpot_s"), write: duration, log: true }),
    new Chart(plots, store, { title: "Output tokens per second", lines: lines("tokens_per_s"), write: number }),
    new Chart(plots, store, { title: "KV cache in use", lines: lines("kv_used"), write: percent }),
    new Chart(plots, store, { title: "Waiting in the engine", lines: lines("waiting"), write: count }),
    new Chart(plots, store, { title: "Load as a share of the limit", lines: lines("saturation"), write: percent }),
  ];
  return {
    update({ live, history }) {
      table.update(live);
      lanes.update(history, live);
      for (const chart of charts) chart.update(history);
      return poll.update();
    },
    close() {
      for (const chart of charts) chart.close();
    },
  };
}

/** The table of replicas; `full` adds further columns and the drain buttons. */
export function replicaTable(store, full) {
  const made = { said: null };
  const columns = [
    { title: "Replica", value: (one) => one.backend, text: (one) => named(one) },
    { title: "State", value: (one) => one.state, fill: (cell, one) => fillState(cell, one, made.failures?.get(one.backend), store.offset) },
    ...(full ? [{ title: "", fill: (cell, one) => fillDrain(cell, one, store, made) }] : []),
    { title: "Load", number: true, value: (one) => share(one), fill: (cell, one) => fillLoad(cell, one), hint: "Requests in flight on the replica, and how many the engine runs at once. A few more may wait in the engine" },
    { title: "TTFT", number: true, value: (one) => one.ttft_s, text: (one) => duration(one.ttft_s), hint: "Mean time of the replica to the first token of a stream, last minute" },
    { title: "Per token", number: true, value: (one) => one.tpot_s, fill: (cell, one) => fillPerToken(cell, one), hint: "Mean time per token after the first, last minute; 2.0x: the replica now takes twice as long as its pool for the same work" },
    ...(full ? [
      { title: "Token pace", value: (one) => one.tokens_slower, text: (one) => pace(one, one.tokens_slower), hint: "Its time for the same work, relative to its pool: median of three measurements" },
      { title: "Prompt pace", value: (one) => one.prompts_slower, text: (one) => pace(one, one.prompts_slower), hint: "Its learned pace for prompts, relative to its pool" },
    ] : []),
    { title: "KV cache", number: true, value: (one) => one.kv_used, fill: (cell, one) => putMeter(cell, one.kv_used, percent(one.kv_used), one.kv_used > 0.9 ? "warning" : "") },
    { title: "Engine queue", number: true, value: (one) => one.waiting, text: (one) => count(one.waiting), hint: "Requests that wait inside the engine" },
    { title: "Tokens/s", number: true, value: (one) => one.output_tokens_per_s, text: (one) => number(one.output_tokens_per_s), hint: "Output tokens of the last minute" },
    { title: "Cache hits", number: true, value: (one) => one.hit_share, text: (one) => percent(one.hit_share), hint: "Share of the prompt tokens found in its prefix cache, last minute" },
  ];
  if (full) {
    columns.push(
      { title: "Failed", number: true, value: (one) => one.failed, text: (one) => `${count(one.failed)} of ${count(one.ended)}`, hint: "Attempts of the last minute" },
      { title: "Adapters", value: (one) => one.adapters.length, text: (one) => one.adapters.join(", ") || "none" },
      { title: "Read", number: true, value: (one) => one.reading_age_s, text: (one) => (one.reading_age_s === null ? "never" : `${duration(one.reading_age_s)} ago`), hint: "Age of the newest reading of its metrics" },
      { title: "Pool", value: (one) => one.pool, text: (one) => one.pool ?? "none" },
      { title: "Address", value: (one) => one.url, text: (one) => one.url },
    );
  }
  const table = new Table({ caption: "Replicas, with their load and pace", columns, key: (one) => one.backend, sort: "Replica", empty: "No replica is known.", what: "replica" });
  return Object.assign(made, {
    element: table.element,
    update(live) {
      made.failures = failures(store.events(), live.now_s - RECENT_S);
      table.update(live.backends, live.more_backends);
    },
  });
}

/** How often each backend left the state up since a time of the proxy's clock, and when and why it did last. */
function failures(events, since) {
  const [found, out] = [new Map(), new Set()];
  for (const { backend, event, at_s, why } of events) {
    if (ENDS.includes(event)) out.delete(backend);
    if (!BEGINS.includes(event)) continue;
    const before = found.get(backend);
    // Down after an ejection is the same failure, with a better reason.
    if (out.has(backend) && before) before.why = why || before.why;
    else if (at_s >= since) found.set(backend, { times: (before?.times ?? 0) + 1, at_s, why });
    out.add(backend);
  }
  return found;
}

function named(one) {
  if (one.external) return `${one.backend} (${one.role}, ${number(one.external.left)} of ${number(one.external.max_per_day)} left today)`;
  return one.role === "both" ? one.backend : `${one.backend} (${one.role})`;
}

const pace = (one, value) => (one.state === "up" ? factor(value) : "–");

const share = (one) => (one.limit ? one.load / one.limit : null);

function fillState(cell, one, failed, offset) {
  if (!cell.firstChild) cell.append(h("div", { className: "why" }, h("span", { className: "state" }), " ", h("span", { className: "quiet" }), h("a"), h("span", { className: "quiet" })));
  const [state, since, when, why] = cell.firstChild.children;
  state.dataset.state = one.state;
  put(state, one.state);
  const last = one.state === "up" ? failed : undefined;
  const reason = last ? last.why : one.state === "up" ? "" : one.why;
  put(since, `for ${duration(one.since_s)}${last ? `: not up ${plural(last.times, "time")} in ${duration(RECENT_S)}, last at ` : ""}`);
  put(when, last ? clock(last.at_s + offset) : "");
  if (last) when.href = `#time/${(last.at_s + offset).toFixed(3)}`;
  else when.removeAttribute("href");
  put(why, reason ? `: ${reason}` : "");
  if (cell.title !== reason) cell.title = reason;
}

function fillPerToken(cell, one) {
  const slow = one.state === "up" && one.tokens_slower >= SLOW;
  put(cell, `${duration(one.tpot_s)}${slow ? `, ${one.tokens_slower.toFixed(1)}x` : ""}`);
  cell.classList.toggle("highlighted", slow);
}

function fillLoad(cell, one) {
  const places = Object.entries(one.places);
  const marks = places.filter(([, most]) => most < one.limit).map(([band, most]) => ({ at: most / one.limit, style: `band-${band}` }));
  cell.title = places.map(([band, most]) => `${band} up to ${count(most)}`).join(", ");
  putMeter(cell, share(one), `${count(one.load)} / ${one.limit === null ? "?" : count(one.limit)}`, "", marks);
}

function fillDrain(cell, one, store, made) {
  const back = one.state === "drained" || one.state === "leaving";
  if (!cell.firstChild) cell.append(h("button", { type: "button" }));
  const button = cell.firstChild;
  put(button, back ? "Undrain" : "Drain");
  button.setAttribute("aria-label", `${back ? "Undrain" : "Drain"} ${one.backend}`);
  button.onclick = async () => {
    button.disabled = true;
    try {
      await post(`/admin/backends/${encodeURIComponent(one.backend)}/${back ? "undrain" : "drain"}`);
      put(made.said, `${one.backend}: ${back ? "it gets requests again" : "it gets no new requests, and finishes the requests in flight"}.`);
    } catch (error) {
      if (error instanceof LockedError) store.askKey(`A drain needs the admin key. ${error.message}`);
      else if (error instanceof RefusedError || error instanceof UnreachableError) put(made.said, `${one.backend}: ${error.message}`);
      else throw error;
    } finally {
      button.disabled = false;
    }
  };
}

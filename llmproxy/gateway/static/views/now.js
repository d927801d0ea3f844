// The first view: the health of the fleet, waiting requests and their reasons, and full replicas.

import { polling } from "../lib/polling.js";
import { bandLooks, Chart } from "../lib/chart.js";
import { json } from "../lib/client.js";
import { card, h, Keyed, put } from "../lib/dom.js";
import { count, duration, number, percent, plural } from "../lib/format.js";
import { EventList } from "./events.js";
import { replicaTable } from "./replicas.js";
import { needed } from "./scale.js";

const DOT_PX = 9;
const DEFAULT = 0; // the level of the default band
const LATE_S = 1; // a higher band that waits this long gets a colour
const USED_UP = "rate_limited"; // refusals by a tenant's own rate are no problem of the proxy
const FLOWS_SHOWN = 3;

export const now = { title: "Now", columns: ["fleet/", "band/"], open };

/** [title, value, note, level]: a level of `warning` or `bad` is written beside the title. */
const TILES = [
  ["Requests/s", (live) => number(live.row["fleet/completed_per_s"] ?? 0), (live) => `completed in a second; ${plural(live.minute.completed, "request")} in ${duration(live.minute.span_s)}`],
  ["Waiting", (live) => count(sum(live.bands, (band) => band.waiting)), (live) => `${count(sum(live.bands, (band) => band.blocked))} more wait for usage limits`, (live) => (live.bands.some((band) => band.level > DEFAULT && band.oldest_s >= LATE_S) ? "bad" : live.bands.some((band) => band.waiting) ? "warning" : "")],
  ["In flight", (live) => count(sum(live.backends, (one) => one.load)), (live) => `of ${count(sum(live.backends, (one) => (one.state === "up" ? (one.limit ?? 0) : 0)))} that the replicas can run`],
  ["Output tokens/s", (live) => number(live.row["fleet/output_tokens_per_s"]), (live) => `${number(live.row["fleet/input_tokens_per_s"])} input tokens/s`],
  ["Cache hits", (live) => percent(live.row["fleet/hit_share"]), () => "of the prompt tokens, last minute"],
  ["Refused, failed", (live) => `${count(live.minute.refused)}, ${count(live.minute.failed)}`, (live) => `in ${duration(live.minute.span_s)}; ${[...reasons(live), plural(live.minute.retries, "retry").replace("retrys", "retries")].join(", ")}`, (live) => (live.minute.failed ? "bad" : live.minute.refused > (live.minute.outcomes[USED_UP] ?? 0) ? "warning" : "")],
  ["Replicas up", (live) => count(inState(live, "up")), (live) => `of ${count(live.backends.length + live.more_backends)}${["down", "ejected", "leaving", "drained", "starting"].filter((state) => inState(live, state)).map((state) => `, ${count(inState(live, state))} ${state}`).join("")}`, (live) => (inState(live, "down") || !inState(live, "up") ? "bad" : inState(live, "ejected") ? "warning" : "")],
];

/** Refused and failed requests of the last minute, by outcome, most frequent first. */
const reasons = ({ minute }) => Object.entries(minute.outcomes).sort((one, other) => other[1] - one[1]).map(([name, times]) => `${count(times)} ${name}`);
const inState = (live, state) => live.backends.filter((one) => one.state === state).length;
const sum = (items, value) => items.reduce((total, item) => total + value(item), 0);

function open(host, store) {
  const tiles = [...TILES.map(([title]) => title), "Replicas wanted"].map((title) => ({ title, level: h("strong"), value: h("dd", { className: "big" }, "–"), note: h("dd", { className: "quiet" }) }));
  for (const tile of tiles) tile.element = h("div", { className: "tile" }, h("dt", {}, tile.title, " ", tile.level), tile.value, tile.note);
  const lanes = h("ul", { className: "bands" });
  const rows = new Keyed(lanes, lane);
  const inversions = h("p", { className: "quiet" });
  const table = replicaTable(store, false);
  host.append(
    h("dl", { className: "tiles" }, tiles.map((tile) => tile.element)),
    card("Bands, the most important first", lanes, inversions),
    card("Replicas", table.element),
  );
  const plots = h("div", { className: "pair" });
  host.append(plots);
  const charts = bandCharts(plots, store);
  const events = new EventList(host, 8);
  const scale = tiles.at(-1);
  const poll = polling(store, () => json("/scale"), ({ pools }) => {
    const [value, note] = needed(pools);
    put(scale.value, value);
    put(scale.note, note);
  }, () => {});
  return {
    update({ live, history }) {
      TILES.forEach(([, value, note, level], at) => {
        const found = level?.(live) ?? "";
        tiles[at].element.dataset.level = found;
        put(tiles[at].level, found);
        put(tiles[at].value, value(live));
        put(tiles[at].note, note(live));
      });
      rows.update(live.bands, (band) => band.band, (parts, band) => fillLane(parts, band, live.pools));
      put(inversions, `Priority inversions: ${count(live.inversions)}. An inversion is a grant to a lower band while a higher band had a request that could run.`);
      table.update(live);
      for (const chart of charts) chart.update(history);
      events.update(store);
      return poll.update();
    },
    close() {
      for (const chart of charts) chart.close();
    },
  };
}

/** The charts of waiting requests and waiting times by band. */
export function bandCharts(host, store) {
  const lines = (suffix, extra = {}) => (history) => bands(store, history).map((band, at) => ({ label: band, column: `band/${band}/${suffix}`, ...bandLooks(band, at), ...extra }));
  return [
    new Chart(host, store, { title: "Waiting requests", note: "The bands are stacked: the highest line is the sum.", lines: lines("waiting"), write: count, stacked: true }),
    new Chart(host, store, { title: "Wait in the queue, p95", note: "Of requests that ended in the last minute. A higher band should be below a lower one.", lines: lines("wait_p95_s"), write: duration, log: true }),
  ];
}

/** The names of the bands, the highest first. */
export function bands(store, history) {
  const known = store.live?.bands.map((band) => band.band) ?? [];
  return [...known, ...history.names("band/", "/waiting").filter((name) => !known.includes(name))];
}

function lane() {
  const parts = { name: h("h3"), waiting: h("span", { className: "big" }), reason: h("p", { className: "reason" }), flows: h("p", { className: "flows" }) };
  parts.facts = ["oldest", "granted/s", "TTFT p50", "TTFT p99", "objective met", "may fill"].map((name) => ({ name, value: h("dd") }));
  parts.element = h("li", { className: "band" },
    h("div", { className: "band-name" }, parts.name, h("p", {}, parts.waiting, " waiting")),
    h("div", { className: "band-line" }, h("div", { className: "dots", "aria-hidden": "true" }, (parts.dots = h("span"))), parts.reason, parts.flows),
    h("dl", { className: "facts" }, parts.facts.map((fact) => h("div", {}, h("dt", {}, fact.name), fact.value))));
  return parts;
}

/** The waiting flows of a band in all pools, most requests first, and the number of flows left out. */
function waiting(band, pools) {
  const [found, parts] = [new Map(), pools.flatMap((pool) => pool.bands.filter((one) => one.band === band.band))];
  for (const flow of parts.flatMap((part) => part.flows)) {
    const before = found.get(flow.flow) ?? { waiting: 0, oldest_s: 0 };
    found.set(flow.flow, { waiting: before.waiting + flow.waiting, oldest_s: Math.max(before.oldest_s, flow.oldest_s) });
  }
  const flows = [...found].sort((one, other) => other[1].waiting - one[1].waiting);
  return { flows, more: Math.max(0, flows.length - FLOWS_SHOWN) + sum(parts, (part) => part.more_flows), places: sum(parts, (part) => part.places) };
}

function fillLane(parts, band, pools) {
  parts.element.dataset.band = band.band;
  put(parts.name, band.band);
  put(parts.waiting, count(band.waiting));
  parts.dots.style.width = `${band.waiting * DOT_PX}px`;
  const blocked = band.blocked ? `${plural(band.blocked, "request")} more for a usage limit.` : "";
  put(parts.reason, [band.reasons.map((reason) => `Why: ${reason}.`).join(" "), blocked].filter(Boolean).join(" ") || (band.waiting ? "" : "Nothing waits."));
  const { flows, more, places } = waiting(band, pools);
  const named = flows.slice(0, FLOWS_SHOWN).map(([name, flow]) => `${name || "no name"}: ${count(flow.waiting)}, oldest ${duration(flow.oldest_s)}`);
  put(parts.flows, [...named, ...(more ? [`and ${plural(more, "more flow")}`] : [])].join("; "));
  const asked = band.objectives.met + band.objectives.missed;
  const values = [
    band.waiting ? duration(band.oldest_s) : "–", number(band.grants_per_s), duration(band.ttft_s.p50), duration(band.ttft_s.p99),
    asked ? percent(band.objectives.met / asked) : "none asked", plural(places, "place"),
  ];
  parts.facts.forEach((fact, at) => put(fact.value, values[at]));
}

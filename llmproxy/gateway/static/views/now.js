// Is all well, who waits and why, and which replica is full: the first view.

import { asking } from "../lib/asking.js";
import { bandLooks, Chart } from "../lib/chart.js";
import { json } from "../lib/client.js";
import { bar, card, h, Keyed, put } from "../lib/dom.js";
import { count, duration, number, percent, plural } from "../lib/format.js";
import { EventList } from "./events.js";
import { replicaTable } from "./replicas.js";
import { needed } from "./scale.js";

const DOT_PX = 9;

export const now = { title: "Now", columns: ["fleet/", "band/"], open };

const TILES = [
  ["Requests/s", (live) => number(live.row["fleet/completed_per_s"] ?? 0), (live) => `completed in a second; ${plural(live.minute.completed, "request")} in ${duration(live.minute.span_s)}`],
  ["Waiting", (live) => count(sum(live.bands, (band) => band.waiting)), (live) => `${count(sum(live.bands, (band) => band.blocked))} more for limits of their own`],
  ["In flight", (live) => count(sum(live.backends, (one) => one.load)), (live) => `of ${count(sum(live.backends, (one) => (one.state === "up" ? (one.limit ?? 0) : 0)))} that replicas take`],
  ["Output tokens/s", (live) => number(live.row["fleet/output_tokens_per_s"]), (live) => `${number(live.row["fleet/input_tokens_per_s"])} input tokens/s`],
  ["Cache hits", (live) => percent(live.row["fleet/hit_share"]), () => "of the prompt tokens, last minute"],
  ["Refused, failed", (live) => `${count(live.minute.refused)}, ${count(live.minute.failed)}`, (live) => `in ${duration(live.minute.span_s)}; ${plural(live.minute.retries, "retry").replace("retrys", "retries")}`],
];

const sum = (items, of) => items.reduce((total, item) => total + of(item), 0);

function open(host, store) {
  const tiles = [...TILES.map(([title]) => title), "Replicas wanted"].map((title) => ({ title, value: h("dd", { className: "big" }, "–"), note: h("dd", { className: "quiet" }) }));
  const lanes = h("ul", { className: "bands" });
  const rows = new Keyed(lanes, lane);
  const inversions = h("p", { className: "quiet" });
  const table = replicaTable(store, false);
  host.append(
    h("dl", { className: "tiles" }, tiles.map((tile) => h("div", { className: "tile" }, h("dt", {}, tile.title), tile.value, tile.note))),
    card("Bands, the most important first", lanes, inversions),
    card("Replicas", table.element),
  );
  const plots = h("div", { className: "pair" });
  host.append(plots);
  const charts = bandCharts(plots, store);
  const events = new EventList(host, 8);
  const scale = tiles.at(-1);
  const poll = asking(store, () => json("/scale"), ({ pools }) => {
    const [value, note] = needed(pools);
    put(scale.value, value);
    put(scale.note, note);
  }, () => {});
  return {
    update({ live, history }) {
      TILES.forEach(([, value, note], at) => {
        put(tiles[at].value, value(live));
        put(tiles[at].note, note(live));
      });
      rows.update(live.bands, (band) => band.band, fillLane);
      put(inversions, `Inversions: ${count(live.inversions)}. That is how often a lower band was served although a higher one could have been.`);
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

/** Waiting requests and waits of each band: does priority work? */
export function bandCharts(host, store) {
  const lines = (suffix, extra = {}) => (history) => bands(store, history).map((band, at) => ({ label: band, column: `band/${band}/${suffix}`, ...bandLooks(band, at), ...extra }));
  return [
    new Chart(host, store, { title: "Waiting requests", note: "One band on top of the other: the highest line is all that wait.", lines: lines("waiting"), write: count, stacked: true }),
    new Chart(host, store, { title: "Wait in the queue, p95", note: "Of requests that ended in the last minute. A higher band should be below a lower one.", lines: lines("wait_p95_s"), write: duration, log: true }),
  ];
}

/** The names of the bands, the highest first. */
export function bands(store, history) {
  const known = store.live?.bands.map((band) => band.band) ?? [];
  return [...known, ...history.names("band/", "/waiting").filter((name) => !known.includes(name))];
}

function lane() {
  const parts = { name: h("h3"), waiting: h("span", { className: "big" }), line: bar(), reason: h("p", { className: "reason" }) };
  parts.facts = ["oldest", "granted/s", "TTFT p50", "TTFT p99", "objective met"].map((name) => ({ name, value: h("dd") }));
  parts.element = h("li", { className: "band" },
    h("div", { className: "band-name" }, parts.name, h("p", {}, parts.waiting, " waiting")),
    h("div", { className: "band-line" }, h("div", { className: "dots", "aria-hidden": "true" }, (parts.dots = h("span"))), parts.reason),
    h("dl", { className: "facts" }, parts.facts.map((fact) => h("div", {}, h("dt", {}, fact.name), fact.value))));
  return parts;
}

function fillLane(parts, band) {
  parts.element.dataset.band = band.band;
  put(parts.name, band.band);
  put(parts.waiting, count(band.waiting));
  parts.dots.style.width = `${band.waiting * DOT_PX}px`;
  const blocked = band.blocked ? `${plural(band.blocked, "request")} more for a limit of their own.` : "";
  put(parts.reason, [band.reasons.map((reason) => `Why: ${reason}.`).join(" "), blocked].filter(Boolean).join(" ") || (band.waiting ? "" : "Nothing waits."));
  const asked = band.objectives.met + band.objectives.missed;
  const values = [
    band.waiting ? duration(band.oldest_s) : "–", number(band.grants_per_s), duration(band.ttft_s.p50), duration(band.ttft_s.p99),
    asked ? percent(band.objectives.met / asked) : "none asked",
  ];
  parts.facts.forEach((fact, at) => put(fact.value, values[at]));
}

// Are caches used, are predictions good, and where is which adapter.

import { Chart } from "../lib/chart.js";
import { json } from "../lib/client.js";
import { card, h, put, putMeter } from "../lib/dom.js";
import { count, number, percent } from "../lib/format.js";
import { Table } from "../lib/table.js";
import { asking } from "./requests.js";

export const caches = { title: "Caches and adapters", columns: ["fleet/hit_share", "fleet/ttft_error", "fleet/input_tokens"], open };

function open(host, store) {
  const table = new Table({
    caption: "Prefix caches by replica", key: (one) => one.backend, sort: "Replica", empty: "No replica is known.", what: "replica",
    columns: [
      { title: "Replica", value: (one) => one.backend, text: (one) => one.backend },
      { title: "Expected", number: true, value: (one) => one.expected_share, fill: (cell, one) => putMeter(cell, one.expected_share, percent(one.expected_share)), hint: "Share of prompt tokens that the proxy expected in the cache when it chose the replica" },
      { title: "Found", number: true, value: (one) => one.hit_share, fill: (cell, one) => putMeter(cell, one.hit_share, percent(one.hit_share)), hint: "Share of prompt tokens that the replica found there" },
      { title: "Prompt tokens/s", number: true, value: (one) => one.input_tokens_per_s, text: (one) => number(one.input_tokens_per_s) },
      { title: "Index used", number: true, value: (one) => one.indexed_share, text: (one) => percent(one.indexed_share), hint: "Blocks that the proxy believes to be cached, of those that the replica can hold" },
      { title: "KV cache", number: true, value: (one) => one.kv_used, text: (one) => percent(one.kv_used) },
      { title: "Busy with prompts", number: true, value: (one) => one.busy_share, text: (one) => percent(one.busy_share) },
    ],
  });
  const matrix = h("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": "Adapters by replica" });
  const said = h("p", { className: "quiet", role: "status" });
  const managed = h("ul", { className: "plain" });
  host.append(card("Prefix caches, last minute", table.element));
  const plots = h("div", { className: "pair" });
  host.append(plots, card("Adapters by replica", matrix, said, managed));
  const charts = [
    new Chart(plots, store, { title: "Prompt tokens from caches", lines: () => [{ label: "found", column: "fleet/hit_share", colour: "series-3" }], write: percent }),
    new Chart(plots, store, { title: "Error of predicted TTFT", note: "Mean of |predicted − seen| / seen, last minute.", lines: () => [{ label: "error", column: "fleet/ttft_error", colour: "series-2" }], write: percent }),
  ];
  const poll = asking(store, () => json("/debug/adapters"), (found) => managed.replaceChildren(...found.adapters.map(adapterLine)), (text) => put(said, text));
  let shown = "";
  return {
    update({ live, history }) {
      table.update(live.backends, live.more_backends);
      for (const chart of charts) chart.update(history);
      const now = JSON.stringify(live.backends.map((one) => [one.backend, one.adapters, one.adapters_max]));
      if (now !== shown) matrix.replaceChildren(adapterTable(live.backends));
      shown = now;
      return poll.update();
    },
    close() {
      for (const chart of charts) chart.close();
    },
  };
}

/** Which adapter is loaded where: rows are adapters, columns replicas. */
function adapterTable(backends) {
  const names = [...new Set(backends.flatMap((one) => one.adapters))].sort().slice(0, 100);
  if (names.length === 0) return h("p", { className: "quiet" }, "No adapter is loaded.");
  const shown = backends.slice(0, 64);
  return h("table", {}, h("caption", { className: "hidden" }, "Adapters by replica"),
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Adapter"), shown.map((one) => h("th", { scope: "col", className: "middle" }, one.backend,
      h("span", { className: "quiet" }, ` ${count(one.adapters.length)}${one.adapters_max ? ` of ${count(one.adapters_max)}` : ""}`))))),
    h("tbody", {}, names.map((name) => h("tr", {}, h("th", { scope: "row" }, name), shown.map((one) => {
      const loaded = one.adapters.includes(name);
      return h("td", { className: `middle ${loaded ? "loaded" : ""}` }, loaded ? "loaded" : "–");
    })))));
}

function adapterLine(adapter) {
  return h("li", {}, h("strong", {}, adapter.name ?? adapter.adapter ?? ""), " ", JSON.stringify(adapter));
}

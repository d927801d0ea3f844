// The view of caches and adapters: cache hits, prediction errors, and adapters by replica.

import { polling } from "../lib/polling.js";
import { Chart } from "../lib/chart.js";
import { json } from "../lib/client.js";
import { card, h, put, putMeter } from "../lib/dom.js";
import { count, duration, number, percent, plural } from "../lib/format.js";
import { Table } from "../lib/table.js";

export const caches = { title: "Caches and adapters", columns: ["fleet/hit_share", "fleet/ttft_error", "fleet/input_tokens"], open };

function open(host, store) {
  const table = new Table({
    caption: "Prefix caches by replica", key: (one) => one.backend, sort: "Replica", empty: "No replica is known.", what: "replica",
    columns: [
      { title: "Replica", value: (one) => one.backend, text: (one) => one.backend },
      { title: "Expected", number: true, value: (one) => one.expected_share, fill: (cell, one) => putMeter(cell, one.expected_share, percent(one.expected_share)), hint: "Share of prompt tokens that the proxy expected in the cache when it chose the replica. It counts whole blocks of 512 bytes, so it expects too little of short prompts" },
      { title: "Found", number: true, value: (one) => one.hit_share, fill: (cell, one) => putMeter(cell, one.hit_share, percent(one.hit_share)), hint: "Share of prompt tokens that the replica found there" },
      { title: "Prompt tokens/s", number: true, value: (one) => one.input_tokens_per_s, text: (one) => number(one.input_tokens_per_s) },
      { title: "Index used", number: true, value: (one) => one.indexed_share, text: (one) => percent(one.indexed_share), hint: "Blocks that the proxy expects in the cache, as a share of the blocks that fit in it" },
      { title: "KV cache", number: true, value: (one) => one.kv_used, text: (one) => percent(one.kv_used) },
      { title: "Busy with prompts", number: true, value: (one) => one.busy_share, text: (one) => percent(one.busy_share) },
    ],
  });
  const matrix = h("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": "Adapters by replica" });
  const said = h("p", { className: "quiet", role: "status" });
  const managed = h("ul", { className: "plain" });
  const worth = h("ul", { className: "plain" });
  host.append(card("Prefix caches, last minute", worth, table.element));
  const plots = h("div", { className: "pair" });
  host.append(plots, card("Adapters by replica", h("p", { className: "quiet" }, "In a slot: requests for the adapter start at once. A replica without the adapter in a slot loads it at the next request."), matrix, said, managed));
  const charts = [
    new Chart(plots, store, { title: "Prompt tokens from caches", lines: () => [{ label: "found", column: "fleet/hit_share", colour: "series-3" }], write: percent }),
    new Chart(plots, store, { title: "Error of predicted TTFT", note: "Mean of |predicted − seen| / seen, last minute.", lines: () => [{ label: "error", column: "fleet/ttft_error", colour: "series-2" }], write: percent }),
  ];
  const poll = polling(store, () => Promise.all([json("/debug/adapters"), json("/debug/explain", { limit: 1 })]), ([{ adapters }, { pools }]) => {
    managed.replaceChildren(...adapters.map(adapterLine));
    worth.replaceChildren(...worthLines(pools, store.live.backends).map((line) => h("li", {}, line)));
  }, (text) => put(said, text));
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

/** The adapters in slots: a row for each adapter, a column for each replica. */
function adapterTable(backends) {
  const names = [...new Set(backends.flatMap((one) => one.adapters))].sort().slice(0, 100);
  if (names.length === 0) return h("p", { className: "quiet" }, "No adapter is in use.");
  const shown = backends.slice(0, 64);
  return h("table", {}, h("caption", { className: "hidden" }, "Adapters by replica"),
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Adapter"), shown.map((one) => h("th", { scope: "col", className: "middle" }, one.backend,
      h("span", { className: "quiet" }, ` (${one.adapters_max ? `${count(one.adapters.length)} of ${plural(one.adapters_max, "slot")}` : `${count(one.adapters.length)} in slots`})`))))),
    h("tbody", {}, names.map((name) => h("tr", {}, h("th", { scope: "row" }, name), shown.map((one) => {
      const loaded = one.adapters.includes(name);
      return h("td", { className: `middle ${loaded ? "loaded" : ""}` }, loaded ? "in a slot" : "–");
    })))));
}

/** The requested state of an adapter, and the replicas that have reached it. */
function adapterLine({ adapter, model, path, later_ones_too, replicas }) {
  const done = replicas.filter((one) => one.done);
  const open = replicas.filter((one) => !one.done).map((one) => `${one.backend} ${one.wanted}s it${one.failures ? ` after ${plural(one.failures, "failure")}` : ""}`);
  const [word, from] = path === null ? ["Unloaded", ""] : ["Loaded", ` from ${path}`];
  return h("li", {}, h("strong", {}, adapter), ` ${word} for ${model}${from}: ${count(done.length)} of ${plural(replicas.length, "replica")}${open.length ? `; ${open.join(", ")}` : ""}. ${later_ones_too ? "Replicas that come later load it too." : ""}`);
}

/** The savings by caches and the cost of adapters, from the learned times of each pool. */
function worthLines(pools, backends) {
  return pools.filter((pool) => pool.learned).flatMap(({ pool, learned }) => {
    const served = backends.filter((one) => one.pool === pool && one.hit_share !== null);
    const asked = served.reduce((sum, one) => sum + one.input_tokens_per_s, 0);
    const cached = served.reduce((sum, one) => sum + one.input_tokens_per_s * one.hit_share, 0);
    const speed = learned.prefill_tokens_per_s;
    return [
      asked ? `${pool}: ${number(cached)} of ${number(asked)} prompt tokens/s came from caches.${speed ? ` A replica computes ${number(speed)}/s, so they save the work of ${(cached / speed).toFixed(2)} replicas.` : ""}` : "",
      learned.adapter_s > 0 ? `${pool}: a request whose adapter has to be loaded first waits ${duration(learned.adapter_s)} for it.` : "",
    ].filter(Boolean);
  });
}

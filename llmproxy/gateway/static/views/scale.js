// The replicas that each pool needs, and the load at which its replicas are full.

import { count, number } from "../lib/format.js";
import { Table } from "../lib/table.js";

const REASONS = {
  work: "arriving requests", ahead: "arriving requests, which increase", queue: "waiting requests", seats: "requests in flight", kv: "the KV cache", adapters: "adapters in use",
  idle: "no requests", min: "scaling.min", max: "scaling.max", unknown: "too little is known: the present number",
};
const TIMES_MAX = 100;

/** The load at which the replicas that are up are full, as a multiple of the present load; null if unknown. */
function times({ sure, terms, replicas }) {
  const need = Math.max((terms.ahead ?? 0) + (terms.queue ?? 0), terms.seats ?? 0, terms.kv ?? 0);
  return sure && need > 0 ? Math.min(TIMES_MAX, replicas.up / need) : null;
}

function fullAt(pool) {
  const found = times(pool);
  if (found === null) return "–";
  return found < TIMES_MAX ? `${found.toFixed(1)}x the recent load` : `over ${TIMES_MAX}x the recent load`;
}

/** The value and the note of a tile for all pools. */
export function needed(pools) {
  const up = pools.reduce((sum, pool) => sum + pool.replicas.up, 0);
  const said = !pools.every((pool) => pool.sure) ? "too little is known yet" : pools.length === 1 ? `full at ${fullAt(pools[0])}, low bands aside` : `in ${count(pools.length)} pools`;
  return [count(pools.reduce((sum, pool) => sum + pool.desired, 0)), `${count(up)} up; ${said}`];
}

export function scaleTable() {
  return new Table({
    caption: "Replicas that each pool wants", key: (one) => one.pool, empty: "No pool is known yet.", what: "pool",
    columns: [
      { title: "Pool", text: (one) => one.pool },
      { title: "Up", number: true, text: (one) => count(one.replicas.up) },
      { title: "Needs", number: true, text: (one) => (one.sure ? one.need.toFixed(2) : "–"), hint: "In fully used, not overloaded replicas. Bands below scaling.from_band do not count" },
      { title: "Wants", number: true, text: (one) => count(one.desired), hint: "The need, rounded up, from scaling.min to scaling.max" },
      { title: "Because of", text: (one) => REASONS[one.reason] ?? one.reason },
      { title: "Full at", text: fullAt, hint: "The load of the bands from scaling.from_band up at which the replicas that are up are full. Some requests wait before that, because they do not arrive evenly. The recent load is the mean of two minutes, or of the last 30 s if more came then" },
      { title: "A replica serves", text: (one) => (one.replica ? `${number(one.replica.requests_per_s)} requests/s, ${count(one.replica.seats)} at once` : "–") },
    ],
  });
}

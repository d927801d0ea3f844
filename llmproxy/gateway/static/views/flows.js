// The view of flows: waiting requests, the reasons, and the shares of flows.

import { Chart, looks } from "../lib/chart.js";
import { card, h, put, putMeter } from "../lib/dom.js";
import { count, duration, number, percent } from "../lib/format.js";
import { link, Table } from "../lib/table.js";

export const flows = { title: "Flows", columns: ["flow/"], open };

function open(host, store) {
  const heads = new Table({
    caption: "The next request of each waiting flow", key: (one) => `${one.pool}/${one.band}/${one.flow}`, what: "flow",
    empty: "Nothing waits.",
    columns: [
      { title: "Flow", text: (one) => one.flow },
      { title: "Band", text: (one) => one.band },
      { title: "Pool", text: (one) => one.pool },
      { title: "Waiting", number: true, text: (one) => count(one.waiting) },
      { title: "Next request", fill: (cell, one) => link(cell, one.head.request, `#requests/${encodeURIComponent(one.head.request)}`) },
      { title: "Its age", number: true, text: (one) => duration(one.head.age_s) },
      { title: "May wait", number: true, text: (one) => duration(one.head.left_s), hint: "Then it is refused" },
      { title: "Slack", number: true, text: (one) => duration(one.head.slack_s), hint: "Time left until its objective for the first token; below 0 it will be late" },
      { title: "Prompt tokens", number: true, text: (one) => count(one.head.prompt_tokens) },
      { title: "Why it waits", text: (one) => one.reason ?? "its flow's turn is later" },
    ],
  });
  const shares = new Table({
    caption: "Flows of the last minute", key: (one) => `${one.band}/${one.flow}`, sort: "Tokens/s", descending: true, what: "flow",
    empty: "No request ended in the last minute.",
    columns: [
      { title: "Flow", value: (one) => one.flow, text: (one) => one.flow },
      { title: "Band", value: (one) => one.band, text: (one) => one.band },
      { title: "Got", number: true, value: (one) => one.share, fill: fillShare, hint: "Its share of the tokens of its band; the mark is the share by weight, if all flows ask for more than that" },
      { title: "Due", number: true, value: (one) => one.due, text: (one) => percent(one.due) },
      { title: "Fair", value: (one) => one.fair[0], fill: fillFair, hint: "Whether it waits with at least a tenth less than its due share, while other flows got more" },
      { title: "Tokens/s", number: true, value: (one) => one.tokens_per_s, text: (one) => number(one.tokens_per_s), hint: "Tokens in and out, of the last minute" },
      { title: "Ended", number: true, value: (one) => one.ended, text: (one) => count(one.ended) },
      { title: "Waiting", number: true, value: (one) => one.waiting, text: (one) => count(one.waiting) },
      { title: "Oldest", number: true, value: (one) => (one.waiting ? one.oldest_s : null), text: (one) => (one.waiting ? duration(one.oldest_s) : "–") },
      { title: "Standing", text: standing, hint: "The account of the flow in the fairness policy" },
    ],
  });
  const limits = new Table({
    caption: "Limits of tenants and models", key: (one) => one.limit, sort: "In flight", descending: true, what: "limit",
    empty: "No limit is in use.",
    columns: [
      { title: "Limit", value: (one) => one.limit, text: (one) => one.limit },
      { title: "In flight", number: true, value: (one) => one.in_flight, text: (one) => `${count(one.in_flight)}${one.in_flight_max === null ? "" : ` of ${count(one.in_flight_max)}`}` },
      { title: "Requests left", number: true, value: (one) => one.requests_left, text: (one) => number(one.requests_left) },
      { title: "Tokens left", number: true, value: (one) => one.tokens_left, text: (one) => number(one.tokens_left), hint: "Tokens that the rate allows now; below 0, more were used than estimated" },
    ],
  });
  host.append(card("Shares of the last minute", h("p", { className: "quiet" }, "The share of each flow in the tokens of its band; the mark is the share by weight. A flow that asks for less leaves the rest to others. Only a flow that waits and stays below its mark gets too little. A flow that began within the minute is below its mark at first."), shares.element), card("Who waits, in the order of service", heads.element));
  const chart = new Chart(host, store, {
    title: "Tokens per second by flow", note: "The flows with most tokens. Mean of the last minute.", write: number, stacked: true, height: 190,
    lines: (history) => history.names("flow/", "/tokens_per_s").map((name, at) => ({ label: name, column: `flow/${name}/tokens_per_s`, ...looks(at) })),
  });
  const waits = new Chart(host, store, {
    title: "Wait in the queue by flow", note: "The flows that waited longest. Mean of the last minute, also of requests that were refused.", write: duration, log: true, height: 190,
    lines: (history) => history.names("flow/", "/wait_s").map((name, at) => ({ label: name, column: `flow/${name}/wait_s`, ...looks(at) })),
  });
  host.append(card("Limits", limits.element));
  return {
    update({ live, history }) {
      for (const one of live.flows) one.fair = fair(one, live.flows, minuteAgo(history, one));
      shares.update(live.flows);
      const waiting = live.pools.flatMap((pool) => pool.bands.flatMap((band) => band.flows.map((flow) => ({ ...flow, pool: pool.pool, band: band.band, reason: band.reason }))));
      heads.update(waiting, live.pools.reduce((more, pool) => more + pool.bands.reduce((sum, band) => sum + band.more_flows, 0), 0));
      limits.update(live.limits, live.more_limits);
      chart.update(history);
      waits.update(history);
    },
    close: () => [chart, waits].forEach((each) => each.close()),
  };
}

const fillShare = (cell, one) => putMeter(cell, one.share, percent(one.share), "", one.due === null ? [] : [{ at: one.due }]);

const ENOUGH = 0.9;
const MINUTE_S = 60;

/** A rank (0 is most in need) and a text. `before`: tokens per second of the flow a minute ago. `flows`: all flows. */
export function fair(one, flows, before) {
  if (one.waiting === 0) return [3, "does not wait"];
  if (one.share !== null && one.share >= ENOUGH * one.due) return [2, "waits, has its share"];
  // The shares cover a minute, and the flow began during that minute.
  if (!before) return [1, "waits, began within the minute"];
  // Flows above their share wait longer than this one, so the flow only waits for its turn.
  const longer = flows.some((each) => each.band === one.band && each.share > each.due && each.waiting > 0 && each.oldest_s > one.oldest_s);
  return longer ? [2, "waits less than flows above their share"] : [0, "waits, below its share"];
}

function minuteAgo(history, { band, flow }) {
  return history?.get(`flow/${band}/${flow}/tokens_per_s`)?.at(-1 - Math.ceil(MINUTE_S / history.step));
}

function fillFair(cell, one) {
  const [rank, words] = one.fair;
  put(cell, words);
  cell.classList.toggle("highlighted", rank === 0);
}

const standing = (one) => Object.entries(one.standing).map(([name, value]) => `${name} ${number(value)}`).join(", ") || "–";

// The course of a request: its wait, its attempts with the reasons for each replica, and its end.

import { polling } from "../lib/polling.js";
import { json } from "../lib/client.js";
import { card, h, put } from "../lib/dom.js";
import { clock, count, duration, plural } from "../lib/format.js";
import { priceCard } from "./price.js";

export function story(host, store, id) {
  const content = h("div");
  const said = h("p", { className: "quiet", role: "status" });
  host.append(h("p", {}, h("a", { href: "#requests" }, "← All requests")), h("h2", { className: "mono" }, id), said, content);
  let ended = false;
  const poll = polling(store, () => (ended ? null : json("/debug/requests", { request: id })), (found) => {
    if (found === null) return;
    ended = found.ended !== null;
    content.replaceChildren(...parts(found, found.now_s + store.offset));
  }, (text) => put(said, text));
  return { update: () => poll.update() };
}

function parts(found, now) {
  const made = [];
  if (found.waits) made.push(card("It waits", h("p", {}, waits(found.waits)), h("p", {}, waited(found.waits))));
  if (found.ended) {
    made.push(card("How it ended", h("p", {}, result(found.ended, now - found.ended.ended_age_s))));
    made.push(card("Its time", timeline(found)));
  }
  found.attempts.forEach((one, at) => made.push(card(`${one.stage === "whole" ? "Attempt" : one.stage === "prefill" ? "Prefill" : "Decode"} ${at + 1}: ${one.backend ?? "no replica"}${found.attempts.slice(0, at).some((earlier) => earlier.committed) ? ", for the rest of the answer" : ""}`, h("ul", {}, attempt(one).map((line) => h("li", {}, line))))));
  if (found.waited?.waited_for) made.push(card("Its last wait", h("p", {}, waited(found.waited))));
  for (const choice of found.choices) made.push(priceCard(choice));
  if (found.attempts.length && found.choices.length === 0) made.push(h("p", { className: "quiet" }, "The proxy remembers the prices of the last 100 choices of a pool. The choice for this request is older."));
  if (found.ended) made.push(h("details", { className: "card" }, h("summary", {}, "All fields of its log line"), fields(found.ended)));
  return made;
}

function waits(place) {
  const ahead = place.ahead_in_flow === null ? "many" : count(place.ahead_in_flow);
  return `In band ${place.band}, flow ${place.flow}, for ${duration(place.waited_s)}: ${count(place.ahead_in_higher_bands)} ahead in higher bands, ${ahead} in its flow. It may wait ${duration(place.left_s)} more.`;
}

/** The rule that delayed a request and the flows that were granted first, as text; "" if it did not wait. */
function waited(why) {
  if (!why.waited_for) return "";
  const first = why.went_first.map(([band, flow, number]) => `${count(number)} of ${flow || "no name"} (${band})`).join(", ");
  return `It waited: ${why.waited_for}.${first ? ` Before it went ${first}.` : ""}`;
}

function result(ended, at) {
  const tokens = ended.prompt_tokens === undefined ? "" : ` ${count(ended.prompt_tokens)} prompt tokens (${count(ended.cached_tokens ?? 0)} cached), ${count(ended.output_tokens ?? 0)} output tokens.`;
  const met = ended.met === undefined ? "" : ended.met ? " Its objective was met." : " Its objective was missed.";
  const whose = [ended.band && `band ${ended.band}`, ended.model && `model ${ended.model}`, (ended.tenant ?? ended.flow) && `flow ${ended.tenant ?? ended.flow}`, ended.key && `key ${ended.key}`, ended.client && `from ${ended.client}`, ended.user_agent && `with ${ended.user_agent}`].filter(Boolean).join(", ");
  const continued = (ended.continued ? " Another replica continued its stream." : "") + (ended.not_continued ? ` It was not continued: ${ended.not_continued}.` : "");
  const sent = ended.attempts ? "" : " It was sent to no replica.";
  return `${whose ? `${whose[0].toUpperCase()}${whose.slice(1)}, at ${clock(at)}: ` : ""}${ended.outcome} (${ended.status ?? "no status"}) after ${duration(ended.duration_s)}, ${count(ended.attempts)} ${ended.attempts === 1 ? "attempt" : "attempts"}.${sent}${continued}${tokens}${met}${ended.error ? ` ${ended.error}` : ""}`;
}

/** The parts of a request's time, as segments of a bar and as a list with their durations. */
function timeline(found) {
  const whole = Math.max(found.ended.duration_s ?? 0, ...found.attempts.map((one) => one.ended_s ?? 0), 1e-6);
  const segments = found.attempts.flatMap((one) => segmentsOf(one, whole));
  if (segments.length === 0) segments.push({ kind: "queue", what: "in the queue", from: 0, to: whole });
  const line = h("div", { className: "timeline", "aria-hidden": "true" }, segments.map(({ kind, from, to }) => {
    const part = h("span", { className: kind });
    part.style.left = `${(from / whole) * 100}%`;
    part.style.width = `${(Math.max(0, to - from) / whole) * 100}%`;
    return part;
  }));
  return [line, h("ul", { className: "timeline-words" }, segments.map(({ kind, what, from, to }) => h("li", {}, h("span", { className: `dot ${kind}` }), `${what}: ${duration(to - from)}`)))];
}

function segmentsOf(one, whole) {
  const [queued, end] = [one.queued_s ?? 0, one.ended_s ?? whole];
  const waited = { kind: "queue", what: "in the queue", from: queued, to: one.granted_s ?? end };
  if (one.granted_s === null) return [waited];
  if (one.first_byte_s === null) return [waited, { kind: "prompt", what: `${one.backend}, ${one.verdict ?? "no answer"}`, from: one.granted_s, to: end }];
  return [
    waited,
    { kind: "prompt", what: `${one.backend} to the first token`, from: one.granted_s, to: one.first_byte_s },
    { kind: "stream", what: `${one.backend} tokens`, from: one.first_byte_s, to: end },
  ];
}

function attempt(one) {
  const lines = [];
  if (one.granted_s !== null) {
    lines.push(`It was sent there after ${duration(one.granted_s - (one.queued_s ?? 0))} in the queue, ${duration(one.granted_s)} after its arrival.`);
  }
  if (one.why) {
    const waiting = Object.values(one.why.waiting).reduce((sum, number) => sum + number, 0);
    const passed = one.why.passed_over ? ` ${count(one.why.passed_over)} were passed over, because no replica with room suited them.` : "";
    if (one.why.waited_for) lines.push(waited(one.why));
    if (one.why.probe) lines.push("It was a probe: its replica was ejected, and this request tested whether it had recovered.");
    lines.push(`It was its turn among ${plural(waiting, "waiting request")} and ${plural(one.why.flows, "flow")} of its band${one.why.guaranteed ? ", by the share that its band is guaranteed" : ""}.${passed}`);
  }
  if (one.price) lines.push(`Its price: ${one.price}; ${plural(one.candidates, "candidate")}.`);
  if (one.predicted_ttft) {
    const took = one.first_byte_s === null ? "" : `, it took ${duration(one.first_byte_s - one.granted_s)}`;
    lines.push(`The first token was predicted after ${duration(one.predicted_ttft.expected_s)} (90% within ${duration(one.predicted_ttft.p90_s)})${took}.`);
  }
  if (one.expected_cached_tokens !== null) lines.push(`${count(one.expected_cached_tokens)} prompt tokens were expected in its cache.`);
  lines.push(`Its end: ${one.verdict ?? "unknown"}${one.status === null ? "" : `, status ${one.status}`}${one.error ? `: ${one.error}` : ""}.`);
  return lines;
}

function fields(ended) {
  return h("dl", { className: "fields" }, Object.entries(ended).map(([name, value]) => [h("dt", {}, name), h("dd", {}, typeof value === "object" ? JSON.stringify(value) : String(value))]));
}


// Why there: the last choices, with the price of every replica that could have been chosen.

import { looks } from "../lib/chart.js";
import { json } from "../lib/client.js";
import { card, h, put } from "../lib/dom.js";
import { count, duration, plural } from "../lib/format.js";
import { asking } from "./requests.js";

export const decisions = { title: "Decisions", columns: [], open };

const SHOWN = 12;
const SEARCHED = 100;
const CANDIDATES_MAX = 10;
/** Terms in the order of their colours; a term of a plugin gets the next one. */
const TERMS = ["queue", "prefill", "stream", "harm", "eviction", "adapter", "memory", "slot"];
const HINTS = {
  queue: "Until the prompts before it are computed",
  prefill: "Computing what is not cached of its prompt",
  stream: "The rest of its answer; a second of it counts a tenth",
  harm: "The delay of others",
  eviction: "Computing again what it displaces from the cache",
  adapter: "Loading its adapter",
  memory: "Its share of the KV cache, where that is scarce",
  slot: "Until a full replica has room",
};
const ALIKE_S = 0.005;

function open(host, store) {
  const content = h("div");
  const said = h("p", { className: "quiet", role: "status" });
  const legend = h("ul", { className: "terms" }, TERMS.map((term) => h("li", { title: HINTS[term] }, swatch(term), term)));
  const find = h("input", { id: "find", type: "search", placeholder: "request, model, tenant, outcome ...", spellcheck: false, autocomplete: "off", oninput: () => poll.now() });
  const fits = ({ request, model, chosen, ended }) => [request, model, chosen, ended?.tenant, ended?.flow, ended?.band, ended?.outcome].some((name) => (name ?? "").toLowerCase().includes(find.value.trim().toLowerCase()));
  host.append(card("The last choices of a replica, the newest first",
    h("p", { className: "quiet" }, "A price is the time that a choice costs, in seconds: for this request and for the others. The cheapest is chosen; prices within 5 ms count as equal. Point at a term to read what it is. Pause (p) to read."), h("form", { className: "filters", onsubmit: (event) => event.preventDefault() }, h("label", { htmlFor: "find" }, "Find"), find), legend, said), content);
  const poll = asking(store, () => Promise.all([json("/debug/explain", { limit: find.value.trim() ? SEARCHED : SHOWN }), json("/debug/requests")]), ([found, { requests }]) => {
    const ends = new Map(requests.map((one) => [one.request_id, one]));
    const choices = found.pools.flatMap((pool) => pool.choices.map((choice) => ({ ...choice, pool: pool.pool, ended: ends.get(choice.request) }))).filter(fits).sort((one, other) => one.age_s - other.age_s);
    content.replaceChildren(...choices.slice(0, SHOWN).map(priceCard));
    const notes = found.pools.filter((pool) => pool.note).map((pool) => pool.note);
    put(said, choices.length ? "" : notes[0] ?? (find.value.trim() ? "None of the last choices fits." : "No request was placed yet."));
  }, (text) => text && put(said, text));
  return { update: () => poll.update() };
}

/** One choice: a bar of its terms for each candidate, the chosen one first. */
export function priceCard(choice) {
  const most = Math.max(...choice.candidates.map((one) => one.total_s), 1e-6);
  const rows = choice.candidates.slice(0, CANDIDATES_MAX).map((one) => {
    const bar = h("span", { className: "price", "aria-hidden": "true" }, Object.entries(one.terms).filter(([, seconds]) => seconds > 0).map(([term, seconds]) => {
      const part = h("span", { title: `${term} ${duration(seconds)}` });
      part.style.width = `${(seconds / most) * 100}%`;
      part.style.backgroundColor = `var(--${lookOf(term)})`;
      return part;
    }));
    const chosen = one.backend === choice.chosen;
    return h("li", { className: chosen ? "chosen" : "" }, h("span", { className: "candidate" }, chosen ? "✓ " : "", one.backend), bar,
      h("span", { className: "price-text" }, priceText(one, choice.prompt_tokens)));
  });
  return h("section", { className: "card" },
    h("h3", {}, h("a", { className: "mono", href: `#requests/${encodeURIComponent(choice.request)}` }, choice.request)),
    h("p", { className: "quiet" }, `${count(choice.prompt_tokens)} prompt tokens for ${choice.model ?? "no model"}, ${duration(choice.age_s)} ago, ${choice.chosen ?? "no replica"} chosen${whyChosen(choice)}${cameOfIt(choice)}`),
    h("ol", { className: "prices" }, rows), dearer(choice.candidates));
}

function cameOfIt({ ended }) {
  return ended ? `. ${ended.tenant ?? ended.flow ?? "No flow"}, band ${ended.band ?? "none"}: ${ended.outcome} after ${duration(ended.duration_s)}` : "";
}

/** The candidates that have no bar; they come in the order of their prices. */
function dearer(candidates) {
  const left = candidates.length - CANDIDATES_MAX;
  if (left <= 0) return null;
  return h("p", { className: "quiet" }, `${plural(left, "more candidate")}, of ${duration(candidates[CANDIDATES_MAX].total_s)} to ${duration(candidates.at(-1).total_s)}.`);
}

/** What the bars do not say: another may be cheaper, by so little that it counts as equal. */
function whyChosen({ chosen, candidates }) {
  if (candidates.length === 1) return ": the only candidate";
  const mine = candidates.find((one) => one.backend === chosen);
  const least = Math.min(...candidates.map((one) => one.total_s));
  if (!mine) return "";
  if (mine.total_s <= least) return ": the cheapest";
  return mine.total_s - least <= ALIKE_S ? `: of the cheapest, within ${duration(ALIKE_S)}, the least loaded` : ": the cheapest with room";
}

function priceText({ total_s, terms, cached_tokens, fits }, promptTokens) {
  const parts = Object.entries(terms).filter(([, seconds]) => seconds >= 0.0005).map(([term, seconds]) =>
    `${term} ${duration(seconds)}${term === "prefill" ? ` (${count(promptTokens - cached_tokens)} of ${count(promptTokens)} tokens uncached)` : ""}`);
  return `${duration(total_s)}${parts.length ? ` = ${parts.join(" + ")}` : ""}${fits ? "" : "; it takes no request now"}`;
}

function lookOf(term) {
  const at = TERMS.indexOf(term);
  return looks(at < 0 ? TERMS.length - 1 : at).colour;
}

function swatch(term) {
  const made = h("span", { className: "dot" });
  made.style.backgroundColor = `var(--${lookOf(term)})`;
  return made;
}

// The price of a choice: a bar of terms for each candidate replica.

import { h } from "../lib/dom.js";
import { count, duration, plural } from "../lib/format.js";

const CANDIDATES_MAX = 10;
/** Terms in the order of their colours. Terms of plugins are grey. */
const TERMS = ["queue", "prefill", "stream", "harm", "eviction", "adapter", "memory", "slot", "headroom", "transfer", "range"];
const HINTS = {
  queue: "Computing the prompts ahead of it",
  prefill: "Computing the uncached part of its prompt",
  stream: "Generating the rest of its answer, at a tenth of the time",
  harm: "The delay of other requests",
  eviction: "Computing evicted prompts again, by how often they are hit, if the prefix cache is full. The KV cache in use only counts running requests: cached prompts fill the rest",
  adapter: "Loading its adapter",
  memory: "Its share of the KV cache, if the cache is nearly full",
  slot: "Waiting until a full replica has room",
  headroom: "The time left until its objective, which other requests may need more",
  transfer: "Moving the KV cache of its prompt to another replica",
  range: "The replica is reserved for prompts of another length",
};
const ALIKE_S = 0.005;

/** The legend of the colours. */
export const termList = () => h("ul", { className: "terms" }, TERMS.map((term) => h("li", { title: HINTS[term] }, swatch(term), term)));

/** A choice: a bar of terms for each candidate, the chosen one first. */
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
      h("span", { className: "price-text" }, one.price));
  });
  return h("section", { className: "card" },
    h("h3", {}, h("a", { className: "mono", href: `#requests/${encodeURIComponent(choice.request)}` }, choice.request)),
    h("p", { className: "quiet" }, `${count(choice.prompt_tokens)} prompt tokens for ${choice.model ?? "no model"}, ${duration(choice.age_s)} ago, ${choice.chosen ?? "no replica"} chosen${whyChosen(choice)}${cameOfIt(choice)}`),
    h("ol", { className: "prices" }, rows), dearer(choice.candidates));
}

function cameOfIt({ ended }) {
  return ended ? `. ${ended.tenant ?? ended.flow ?? "No flow"}, band ${ended.band ?? "none"}: ${ended.outcome} after ${duration(ended.duration_s)}` : "";
}

/** A line about the candidates without a bar. Candidates come in the order of their prices. */
function dearer(candidates) {
  const left = candidates.length - CANDIDATES_MAX;
  if (left <= 0) return null;
  return h("p", { className: "quiet" }, `${plural(left, "more candidate")}, of ${duration(candidates[CANDIDATES_MAX].total_s)} to ${duration(candidates.at(-1).total_s)}.`);
}

/** Why the replica was chosen. A cheaper one may have no room, and nearly equal prices count as equal. */
function whyChosen({ chosen, candidates }) {
  if (candidates.length === 1) return ": the only candidate";
  const mine = candidates.find((one) => one.backend === chosen);
  const least = Math.min(...candidates.map((one) => one.total_s));
  if (!mine) return "";
  if (mine.total_s <= least) return ": the cheapest";
  return mine.total_s - least <= ALIKE_S ? `: of the cheapest, within ${duration(ALIKE_S)}, the least loaded` : ": the cheapest with room";
}

function lookOf(term) {
  const at = TERMS.indexOf(term);
  return at < 0 ? "quiet" : `series-${at + 1}`;
}

function swatch(term) {
  const made = h("span", { className: "dot" });
  made.style.backgroundColor = `var(--${lookOf(term)})`;
  return made;
}

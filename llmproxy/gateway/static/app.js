// The page: requests the state of the proxy once a second, and passes it to the current view.

import { forgetColours } from "./lib/chart.js";
import { history, json, key, LockedError, RefusedError, UnreachableError } from "./lib/client.js";
import { h, put } from "./lib/dom.js";
import { clock } from "./lib/format.js";
import { History } from "./lib/history.js";
import { inBrowser } from "./lib/storage.js";
import { caches } from "./views/caches.js";
import { configuration } from "./views/configuration.js";
import { decisions } from "./views/decisions.js";
import { flows } from "./views/flows.js";
import { now } from "./views/now.js";
import { replicas } from "./views/replicas.js";
import { requests } from "./views/requests.js";
import { time } from "./views/time.js";

const VIEWS = { now, replicas, flows, requests, decisions, caches, time, configuration };
const SPANS = { "5 min": 300, "15 min": 900, "1 h": 3600, "24 h": 86400 };
// The proxy writes a row of the history at each full second of its clock. Pages ask soon after, at random times.
const AFTER_ROW_MS = 60 + Math.random() * 300;
const AGAIN_MS = 250;
const RETRY_MS = 1000;
const COARSE_EVERY_S = 10;
const EVENTS_MAX = 500;
const AROUND_S = 60;
const THEME = "llmproxy-theme";
const element = (id) => document.getElementById(id);

/** The state that the views read. `offset` is Unix time minus the proxy's clock, `moment` a requested Unix time. */
const store = {
  live: null,
  history: null,
  trouble: null, // The error of the newest request for the history.
  span: 300,
  offset: 0,
  zoom: null,
  moment: null,
  paused: false,
  theme: "",
  _events: new Map(),
  events: () => store._events.values(),
  zoomTo: (zoom, moment = null) => {
    Object.assign(store, { zoom, moment });
    shown.view?.update?.(store);
  },
  /** Zooms to a Unix time. Sets a longer span if the current one does not reach back to that time. */
  lookAt: (unix) => {
    const age = (store.live?.unix_s ?? Date.now() / 1000) - unix + AROUND_S;
    if (age > store.span) setSpan(Object.values(SPANS).find((span) => span >= age) ?? Math.max(...Object.values(SPANS)));
    store.zoomTo([unix - AROUND_S, unix + AROUND_S], unix);
  },
};

const shown = { name: "", argument: "", view: null };
let lostSince = null;
let locked = false;
let historyAsked = 0;

const wanted = (name) => (VIEWS[shown.name]?.columns ?? []).some((prefix) => name.startsWith(prefix));

async function loadHistory() {
  store.trouble = null;
  const columns = VIEWS[shown.name].columns;
  if (columns.length === 0) return;
  historyAsked += 1;
  const [turn, span] = [historyAsked, store.span];
  try {
    const answer = await history(span, columns);
    // An older request may be answered later than a newer one.
    if (turn === historyAsked) store.history = History.fromAnswer(answer, span);
  } catch (error) {
    if (!(error instanceof UnreachableError || error instanceof RefusedError)) throw error;
    store.trouble = error.message;
  }
}

async function loadEvents() {
  store._events.clear();
  addEvents((await json("/debug/events")).events);
}

function addEvents(events) {
  for (const event of [...events].reverse()) store._events.set(event.serial, event);
  for (const serial of store._events.keys()) {
    if (store._events.size <= EVENTS_MAX) break;
    store._events.delete(serial);
  }
}

/** Requests the state once. Returns the milliseconds until the next request. */
async function tick() {
  if (store.paused || document.hidden) return RETRY_MS;
  let wait = RETRY_MS;
  try {
    const before = store.live;
    const found = await json("/debug/live", { since: before && !lostSince ? before.second : "" });
    wait = found === null ? AGAIN_MS : 1000 * (1 - (found.now_s % 1)) + AFTER_ROW_MS;
    if (found !== null) await take(found, before);
    lostSince = null;
    locked = false;
  } catch (error) {
    if (error instanceof LockedError) await lock();
    else if (error instanceof UnreachableError) lostSince ??= Date.now() / 1000;
    else if (!(error instanceof RefusedError)) throw error; // A rate limit: ask again later.
  }
  drawStatus();
  return wait;
}

async function take(found, before) {
  if (before && before.version !== found.version) {
    // Another version of the proxy has other files of the page.
    location.reload();
    return;
  }
  store.offset = found.unix_s - found.now_s;
  const anew = before?.instance !== found.instance;
  if (anew) await loadEvents();
  else addEvents(found.events);
  store.live = found;
  const passed = store.history === null ? 0 : found.second - store.history.last;
  const coarse = store.span > 900;
  if (anew || store.history === null || (coarse ? passed >= COARSE_EVERY_S : passed > 1)) await loadHistory();
  else if (!coarse) store.history.append(found.second, found.row, wanted);
  draw();
}

function draw() {
  if (store.live === null) return;
  shown.view?.update?.(store);
  const { version, placement, instance, cluster } = store.live;
  const led = cluster ? ` · ${cluster.leader ? `${cluster.leader} leads ${cluster.members.length} members (${cluster.members.join(", ")}), epoch ${cluster.epoch}` : "the cluster has no leader"}` : "";
  put(element("footer"), `llmproxy ${version} · placement ${placement} · process ${instance}${led} · the proxy's time is ${clock(store.live.unix_s)}`);
}

function drawStatus() {
  const state = lostSince !== null ? "lost" : locked ? "locked" : store.paused ? "paused" : "live";
  document.body.dataset.state = state;
  const summary = element("summary");
  const { level, text } = store.live?.summary ?? { level: "", text: "Connecting…" };
  summary.dataset.level = state === "lost" ? "bad" : state === "locked" ? "warning" : level;
  const said = {
    lost: `The proxy is not reachable since ${clock(lostSince)}. The data is old.`,
    locked: "The proxy shows this page only with its admin key.",
    paused: `Paused at ${clock(store.live?.unix_s ?? Date.now() / 1000)}. ${text}`,
    live: store.trouble === null ? text : `${text} (The plots of this view are old: ${store.trouble})`,
  }[state];
  put(summary, said);
  document.title = `${state === "live" && level !== "ok" ? "● " : state === "lost" ? "✕ " : ""}llmproxy`;
}

// Views

/** Decodes a part of the address, or returns it unchanged if it is invalid. */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

async function route() {
  const [name, ...rest] = location.hash.slice(1).split("/");
  const view = Object.hasOwn(VIEWS, name) ? name : "now";
  const argument = decoded(rest.join("/"));
  if (view === shown.name && argument === shown.argument) return;
  shown.view?.close?.();
  const before = VIEWS[shown.name]?.columns;
  Object.assign(shown, { name: view, argument });
  const content = element("content");
  content.replaceChildren(h("h1", { className: "hidden" }, VIEWS[view].title));
  if (view !== "time") Object.assign(store, { zoom: null, moment: null });
  shown.view = null;
  shown.view = VIEWS[view].open(content, store, argument);
  for (const link of element("nav").children) {
    if (link.hash === `#${view}`) {
      link.setAttribute("aria-current", "page");
      // On a phone the views are wider than the screen.
      link.scrollIntoView({ block: "nearest", inline: "nearest" });
    } else {
      link.removeAttribute("aria-current");
    }
  }
  draw();
  if (store.live && String(before) !== String(VIEWS[view].columns)) await reload();
}

async function reload() {
  try {
    await loadHistory();
    // The columns belong to another view or span.
    if (store.trouble !== null) store.history = null;
    draw();
  } catch (error) {
    if (!(error instanceof LockedError)) throw error;
    store.history = null;
  }
  drawStatus();
}

// The tools of the header

function setSpan(span) {
  store.span = span;
  Object.assign(store, { zoom: null, moment: null });
  for (const input of element("span").querySelectorAll("input")) input.checked = Number(input.value) === span;
  if (store.live) reload();
}

function pause() {
  store.paused = !store.paused;
  element("pause").setAttribute("aria-pressed", store.paused);
  put(element("pause"), store.paused ? "Continue" : "Pause");
  drawStatus();
  if (!store.paused) tick();
}

/** Applies the chosen theme, or the theme of the system. */
function applyTheme() {
  store.theme = store.chosen || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  document.documentElement.dataset.theme = store.theme;
  forgetColours();
  draw();
}

function toggleTheme() {
  store.chosen = store.theme === "dark" ? "light" : "dark";
  inBrowser.set(THEME, store.chosen);
  applyTheme();
}

function showDialog(title, ...children) {
  const dialog = element("dialog");
  const close = h("button", { type: "button", onclick: () => dialog.close() }, "Close");
  dialog.replaceChildren(h("h2", { id: "dialog-title" }, title), ...children, close);
  if (!dialog.open) dialog.showModal();
  return dialog;
}

async function lock() {
  const first = !locked;
  locked = true;
  if (first) askKey(key.get() ? "This key was refused." : "The proxy shows its state only with its admin key.");
}

/** Asks for the admin key with a reason, and tries the key at once. */
export function askKey(why) {
  const input = h("input", { type: "password", id: "admin-key", autocomplete: "current-password", value: key.get() });
  const form = h("form", { method: "dialog", onsubmit: () => {
    key.set(input.value.trim());
    locked = false;
    // After the dialog is closed: a refused key opens it again.
    setTimeout(tick);
  } },
  h("p", {}, why), h("label", { htmlFor: "admin-key" }, "Admin key"), input,
  h("p", { className: "quiet" }, "The key stays in this tab until the tab is closed."), h("button", { type: "submit", className: "main" }, "Use it"));
  showDialog("Admin key", form);
  input.focus();
}
store.askKey = askKey;

const KEYS = [
  ["/", "find a request", () => { location.hash = "#requests"; setTimeout(() => element("find")?.focus(), 0); }],
  ["p", "pause or continue", pause],
  ["t", "light or dark", toggleTheme],
  ...Object.entries(SPANS).map(([name, span], at) => [String(at + 1), `plots of ${name}`, () => setSpan(span)]),
  ["Escape", "show the whole span again", () => store.zoomTo(null)],
  ["?", "these keys", () => showDialog("Keys", h("dl", { className: "keys" }, KEYS.flatMap(([name, what]) => [h("dt", {}, h("kbd", {}, name)), h("dd", {}, what)])))],
];

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || element("dialog").open) return;
  if (event.target.closest("input, select, textarea")) return;
  const found = KEYS.find(([name]) => name === event.key);
  if (found) {
    event.preventDefault();
    found[2]();
  }
}

function begin() {
  for (const [name, view] of Object.entries(VIEWS)) element("nav").append(h("a", { href: `#${name}` }, view.title));
  for (const [name, span] of Object.entries(SPANS)) {
    element("span").append(h("label", {}, h("input", { type: "radio", name: "span", value: span, onchange: () => setSpan(span) }), name));
  }
  setSpan(store.span);
  element("pause").addEventListener("click", pause);
  element("theme").addEventListener("click", toggleTheme);
  element("key").addEventListener("click", () => askKey("If the proxy has an admin key, all data needs the key."));
  element("help").addEventListener("click", () => KEYS.at(-1)[2]());
  store.chosen = inBrowser.get(THEME);
  applyTheme();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", applyTheme);
  addEventListener("keydown", press);
  addEventListener("hashchange", route);
  document.addEventListener("visibilitychange", () => tick());
  route();
  const loop = async () => {
    let wait = RETRY_MS;
    try {
      wait = await tick();
    } finally {
      // An error appears in the console, and the page continues.
      setTimeout(loop, wait);
    }
  };
  loop();
}

begin();

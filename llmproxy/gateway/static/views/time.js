// The view of time: all plots over one time axis, with events as marks.

import { bandLooks, Chart } from "../lib/chart.js";
import { h, put } from "../lib/dom.js";
import { clock, count, duration, number, percent } from "../lib/format.js";
import { Lanes } from "../lib/lanes.js";
import { EventList } from "./events.js";
import { bands } from "./now.js";

export const time = { title: "Time", columns: ["fleet/", "band/", "backend/"], open };

const LATE_S = 2;
const KINDS = [["completed", "series-3", "solid"], ["refused", "series-2", "dashed"], ["failed", "bad", "solid"], ["cancelled", "series-5", "dotted"], ["client_error", "series-4", "dotted"]];

function open(host, store, argument) {
  const shown = h("p", { role: "status" });
  const whole = h("button", { type: "button", onclick: () => store.zoomTo(null) }, "Whole span");
  const moment = h("input", { id: "moment", type: "time", step: 1, required: true });
  const goTo = h("form", { className: "filters", onsubmit: (event) => {
    event.preventDefault();
    // The middle of the entered second.
    store.lookAt(lastTimeOf(moment.value, store.live?.unix_s ?? Date.now() / 1000) + 0.5);
  } }, h("span", {}, h("label", { htmlFor: "moment" }, "What happened at"), moment), h("button", { type: "submit" }, "Show"));
  host.append(h("div", { className: "card actions" }, shown, goTo, whole,
    h("button", { type: "button", onclick: () => saveCsv(store) }, "Save CSV"),
    h("button", { type: "button", onclick: () => savePng(charts) }, "Save PNG"),
    h("p", { className: "quiet" }, "Drag over a plot to zoom in, double-click to see the whole span. Dashed lines are events. The solid line is the requested time, to which the values below the plots belong.")));
  // The events come first, because the plots are long.
  const events = new EventList(host, 200);
  events.list.classList.add("short");
  const lanes = new Lanes(host, store);
  const byBand = (suffix) => (history) => bands(store, history).map((band, at) => ({ label: band, column: `band/${band}/${suffix}`, ...bandLooks(band, at) }));
  const strips = h("div", { className: "strips" });
  host.append(strips);
  const minute = { note: "Of requests that ended in the minute before." };
  const strip = (title, lines, write, extra = {}) => new Chart(strips, store, { title, lines, write, height: 120, ...extra });
  const charts = [
    strip("Waiting requests", byBand("waiting"), count, { stacked: true }),
    strip("Wait in the queue, p95", byBand("wait_p95_s"), duration, { log: true, ...minute }),
    strip("TTFT p50", byBand("ttft_p50_s"), duration, { log: true, ...minute }),
    strip("TTFT p99", byBand("ttft_p99_s"), duration, { log: true, ...minute }),
    strip("Objectives met", byBand("met"), percent),
    strip("Granted per second", byBand("grants_per_s"), number, { stacked: true }),
    strip("Requests that ended, per second", () => KINDS.map(([kind, colour, line]) => ({ label: kind.replace("_", " "), column: `fleet/${kind}_per_s`, colour, line })), number),
    strip("Retries and preemptions per second", () => [{ label: "retries", column: "fleet/retries_per_s", colour: "series-2" }, { label: "preemptions", column: "fleet/preemptions_per_s", colour: "series-5", line: "dashed" }], number),
    strip("Tokens per second", () => [{ label: "input", column: "fleet/input_tokens_per_s", colour: "series-1" }, { label: "output", column: "fleet/output_tokens_per_s", colour: "series-3", line: "dashed" }], number),
    strip("Prompt tokens from caches, error of predicted TTFT", () => [{ label: "from caches", column: "fleet/hit_share", colour: "series-3" }, { label: "error", column: "fleet/ttft_error", colour: "series-2", line: "dashed" }], percent),
  ];
  const at = Number(argument);
  if (argument && Number.isFinite(at)) store.lookAt(at);
  return {
    update(now) {
      const { history, live } = now;
      if (history === null) return;
      const [low, high] = now.zoom ?? history.window(now.offset);
      put(shown, `${clock(low)} to ${clock(high)}, one value every ${duration(history.step)}`);
      whole.disabled = now.zoom === null;
      lanes.update(history, live);
      for (const chart of charts) chart.update(history);
      events.update(now, now.zoom);
    },
    close() {
      for (const chart of charts) chart.close();
    },
  };
}

/** The last Unix time before `now` at which the local clock showed `clock` (14:03:00). `now` may be LATE_S old. */
function lastTimeOf(clock, now) {
  const day = new Date(now * 1000);
  day.setHours(...clock.split(":").map(Number), 0);
  if (day.getTime() / 1000 > now + LATE_S) day.setDate(day.getDate() - 1);
  return day.getTime() / 1000;
}

function save(name, blob) {
  const url = URL.createObjectURL(blob);
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/** A name as a CSV field, which a spreadsheet does not read as a formula. */
function field(name) {
  const safe = /^[=+\-@\t\r]/.test(name) ? `'${name}` : name;
  return `"${safe.replaceAll('"', '""')}"`;
}

function saveCsv({ history, offset, zoom }) {
  if (history === null) return;
  const times = history.times(offset);
  const columns = [...history.columns];
  const lines = [["unix_s", ...columns.map(([name]) => field(name))].join(",")];
  times.forEach((unix, at) => {
    if (zoom && (unix < zoom[0] || unix > zoom[1])) return;
    lines.push([unix.toFixed(3), ...columns.map(([, values]) => (Number.isNaN(values[at]) ? "" : values[at]))].join(","));
  });
  save("llmproxy.csv", new Blob([lines.join("\n"), "\n"], { type: "text/csv" }));
}

/** Saves all plots below each other, with their titles, as one picture. */
function savePng(charts) {
  const drawn = charts.filter((chart) => chart.canvas && !chart.host.hidden);
  if (drawn.length === 0) return;
  const scale = window.devicePixelRatio || 1;
  const title = 22 * scale;
  const style = getComputedStyle(document.documentElement);
  const canvas = h("canvas", { width: Math.max(...drawn.map((chart) => chart.canvas.width)), height: drawn.reduce((sum, chart) => sum + chart.canvas.height + title, 0) });
  const ctx = canvas.getContext("2d");
  ctx.fillStyle = style.getPropertyValue("--surface");
  ctx.fillRect(0, 0, canvas.width, canvas.height);
  let y = 0;
  for (const chart of drawn) {
    ctx.fillStyle = style.getPropertyValue("--text");
    ctx.font = `${13 * scale}px system-ui, sans-serif`;
    ctx.fillText(`${chart.title}: ${chart.shown.map((line) => line.label).join(", ")}`, 8 * scale, y + 15 * scale);
    ctx.drawImage(chart.canvas, 0, y + title);
    y += title + chart.canvas.height;
  }
  canvas.toBlob((blob) => save("llmproxy.png", blob));
}

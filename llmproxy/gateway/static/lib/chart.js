// Plots over time: uPlot with the colours of the page, marks of events, one cursor and one zoom for all.

import { h, put, Keyed } from "./dom.js";
import { clock } from "./format.js";

const HEIGHT = 150;
const DASHES = { solid: [], dashed: [6, 4], dotted: [2, 3] };
const SYNC = "time";
const LOG_LEAST = 0.001; // seconds; smaller values look equal

const colours = new Map();

/** The value of a colour in the stylesheet. */
export function colour(name) {
  if (!colours.has(name)) {
    colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim() || name);
  }
  return colours.get(name);
}

/** Call this after a change of the theme. */
export const forgetColours = () => colours.clear();

const SERIES = ["series-1", "series-2", "series-3", "series-4", "series-5", "series-6", "series-7", "series-8"];
const STYLES = ["solid", "dashed", "dotted"];

/** Colour and line style of a series by its number: colours alone do not distinguish many lines. */
export const looks = (at) => ({ colour: SERIES[at % SERIES.length], line: STYLES[Math.floor(at / SERIES.length) % STYLES.length] });

/** Colour and line style of a band. The predefined bands look the same in all views. */
export function bandLooks(band, at) {
  const known = { critical: ["critical", "solid"], default: ["default", "dashed"], sheddable: ["sheddable", "dotted"] };
  const [name, line] = known[band] ?? [SERIES[(at + 3) % SERIES.length], "solid"];
  return { colour: name, line };
}

export class Chart {
  /**
   * `lines(history)` returns the lines to draw: [{label, column, colour, line, fill}], where `column` is a name in the
   * history or an array. `write` formats a value. `stacked` draws the sums, `log` uses a logarithmic axis.
   */
  constructor(host, time, { title, lines, write, stacked = false, log = false, height = HEIGHT, note = "" }) {
    Object.assign(this, { time, title, lines, write, stacked, log, height });
    this.host = h("div", { className: "plot" });
    this.empty = h("p", { className: "quiet" }, "No value in this span yet.");
    this.legend = h("tbody");
    const table = h("table", { className: "legend" },
      h("caption", { className: "hidden" }, `${title}: values at the cursor, at the time asked for, or the newest`), this.legend);
    this.element = h("figure", { className: "card chart" },
      h("figcaption", {}, h("h3", {}, title), note ? h("p", { className: "quiet" }, note) : null), this.host, this.empty, table);
    this.rows = new Keyed(this.legend, (line) => legendRow(line));
    host.append(this.element);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.host);
    this.shape = "";
  }

  resize() {
    const width = this.host.clientWidth;
    if (this.plot && width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: this.height });
  }

  update(history) {
    if (history === null) return;
    const lines = this.lines(history).map((line) => ({ ...line, values: values(line.column, history) }));
    this.shown = lines;
    const any = lines.some((line) => line.values.some((value) => value !== null));
    this.empty.hidden = any;
    this.host.hidden = !any;
    this.window = history.window(this.time.offset);
    // The row of the requested moment.
    const found = this.time.moment === null ? -1 : history.times(this.time.offset).findIndex((time) => time >= this.time.moment);
    this.asked = found < 0 ? null : found;
    const shape = JSON.stringify([lines.map(({ label, colour: name, line }) => [label, colour(name), line]), this.time.theme]);
    if (shape !== this.shape && any) this.build(lines, shape);
    if (this.plot && any) {
      let drawn = lines.map((line) => line.values);
      if (this.stacked) drawn = stack(drawn).reverse();
      // 0 has no logarithm.
      if (this.log) drawn = drawn.map((column) => column.map((value) => (value === null ? null : Math.max(LOG_LEAST, value))));
      this.plot.setData([history.times(this.time.offset), ...drawn]);
      this.resize();
    }
    this.write_legend();
  }

  build(lines, shape) {
    this.plot?.destroy();
    this.shape = shape;
    const series = lines.map((line) => ({
      label: line.label,
      stroke: colour(line.colour),
      dash: this.stacked ? [] : DASHES[line.line ?? "solid"],
      width: 1.75,
      fill: this.stacked ? mixed(colour(line.colour), colour("surface")) : undefined,
      points: { show: false },
      spanGaps: false,
    }));
    if (this.stacked) series.reverse();
    const axis = { stroke: colour("quiet"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line"), width: 1 }, font: "11px system-ui, sans-serif" };
    this.plot = new window.uPlot({
      width: this.host.clientWidth || 300,
      height: this.height,
      legend: { show: false },
      scales: {
        x: { time: true, range: () => this.time.zoom ?? this.window },
        y: this.log ? { distr: 3, range: (_, low, high) => logRange(low, high) } : { range: (_, low, high) => [Math.min(0, low ?? 0), high > 0 ? high * 1.08 : 1] },
      },
      axes: [
        { ...axis, size: 30, space: 70, values: (_, ticks) => ticks.map((at) => clock(at)) },
        { ...axis, size: 62, space: 28, splits: this.log ? (_, __, low, high) => decades(low, high) : undefined, values: (_, ticks) => ticks.map((at) => (at === null ? "" : this.write(at))) },
      ],
      series: [{}, ...series],
      cursor: { sync: { key: SYNC }, drag: { x: true, y: false, setScale: false }, points: { show: false }, bind: { dblclick: () => () => this.time.zoomTo(null) } },
      hooks: {
        setCursor: [() => this.write_legend()],
        setSelect: [(plot) => this.select(plot)],
        draw: [(plot) => this.mark(plot)],
      },
    }, [[], ...lines.map(() => [])], this.host);
    this.plot.root.setAttribute("role", "img");
    this.plot.root.setAttribute("aria-label", `${this.title} over time; the table after it has the values`);
  }

  select(plot) {
    const { left, width } = plot.select;
    if (width < 3) return;
    this.time.zoomTo([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  }

  mark(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.setLineDash([3, 3]);
    for (const event of this.time.events()) {
      const at = event.at_s + this.time.offset;
      if (at < plot.scales.x.min || at > plot.scales.x.max) continue;
      const x = Math.round(plot.valToPos(at, "x", true));
      ctx.strokeStyle = colour(event.level === "info" ? "quiet" : event.level === "error" ? "bad" : "warning");
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    if (this.time.moment !== null) {
      ctx.fillStyle = colour("accent");
      ctx.fillRect(Math.round(plot.valToPos(this.time.moment, "x", true)) - 1, bbox.top, 2, bbox.height);
    }
    ctx.restore();
  }

  write_legend() {
    const lines = this.shown ?? [];
    const at = this.plot?.cursor.idx ?? this.asked ?? null;
    this.rows.update(lines, (line) => line.label, (row, line) => {
      row.swatch.style.borderTopColor = colour(line.colour);
      row.swatch.style.borderTopStyle = line.line ?? "solid";
      const value = line.values[at ?? line.values.length - 1];
      put(row.value, this.write(value ?? null));
    });
  }

  /** The picture as a canvas, for a file. */
  get canvas() {
    return this.plot?.ctx.canvas ?? null;
  }

  close() {
    this.observer.disconnect();
    this.plot?.destroy();
    this.element.remove();
  }
}

function legendRow(line) {
  const swatch = h("span", { className: "swatch" });
  const value = h("td", { className: "number" });
  return { element: h("tr", {}, h("th", { scope: "row" }, swatch, line.label), value), swatch, value };
}

/** The numbers of a column for uPlot: null is a gap. */
function values(column, history) {
  const found = typeof column === "string" ? history.get(column) : column;
  return found === undefined ? Array(history.size).fill(null) : Array.from(found, (value) => (Number.isNaN(value) ? null : value));
}

/** A mix of two colours `#rrggbb`. The areas of a stack overlap, so transparency would show the wrong colour. */
function mixed(one, other) {
  const parts = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
  const [a, b] = [parts(one), parts(other)];
  return `rgb(${a.map((part, at) => Math.round(part * 0.55 + b[at] * 0.45)).join(" ")})`;
}

/** Adds each line to the sum of the lines before it. A gap counts as 0 if another line has a value. */
function stack(columns) {
  const sums = columns.length ? Array(columns[0].length).fill(0) : [];
  return columns.map((column) => column.map((value, at) => {
    if (columns.every((one) => one[at] === null)) return null;
    sums[at] += value ?? 0;
    return sums[at];
  }));
}

/** Whole decades around the values. */
function logRange(low, high) {
  const from = Math.max(LOG_LEAST, 10 ** Math.floor(Math.log10(Math.max(LOG_LEAST, low ?? 0))));
  return [from, Math.max(from * 10, 10 ** Math.ceil(Math.log10(Math.max(LOG_LEAST, high ?? 0))))];
}

function decades(low, high) {
  const found = [];
  for (let at = Math.round(Math.log10(low)); at <= Math.round(Math.log10(high)); at += 1) found.push(10 ** at);
  return found;
}

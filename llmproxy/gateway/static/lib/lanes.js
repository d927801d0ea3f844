// A row for each replica over time. The colour shows the load; hatching shows that the replica was not up.

import { h, put } from "./dom.js";
import { colour } from "./chart.js";

const ROW = 18;
// The proxy records the history of this many replicas.
const ROWS_MAX = 64;
const STATES = ["up", "starting", "drained", "leaving", "ejected", "down"];
const HATCHED = { 1: "quiet", 2: "quiet", 3: "quiet", 4: "warning", 5: "bad" };

export class Lanes {
  constructor(host, time) {
    this.time = time;
    this.canvas = h("canvas", { role: "img", "aria-label": "How full each replica was over time; the table of replicas has the present values" });
    this.names = h("ol", { className: "lane-names", "aria-hidden": "true" });
    this.note = h("p", { className: "quiet" });
    this.element = h("figure", { className: "card chart" },
      h("figcaption", {}, h("h3", {}, "Replicas over time"),
        h("p", { className: "quiet" }, "Darker is fuller. Hatched: grey starting or drained, yellow ejected, red down.")),
      h("div", { className: "lanes" }, this.names, this.canvas), this.note);
    host.append(this.element);
  }

  update(history, live) {
    if (history === null) return;
    const names = history.names("backend/", "/state");
    const times = history.times(this.time.offset);
    const [low, high] = this.time.zoom ?? history.window(this.time.offset);
    if (this.names.children.length !== names.length || names.some((name, at) => this.names.children[at].textContent !== name)) {
      this.names.replaceChildren(...names.map((name) => h("li", { title: name }, name)));
    }
    const scale = window.devicePixelRatio || 1;
    const width = Math.max(50, this.canvas.parentElement.clientWidth - this.names.offsetWidth - 8);
    const height = Math.max(1, names.length) * ROW;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    const ctx = this.canvas.getContext("2d");
    ctx.scale(scale, scale);
    const place = (at) => ((at - low) / (high - low || 1)) * width;
    const cell = (history.step / (high - low || 1)) * width;
    names.forEach((name, row) => {
      const states = history.get(`backend/${name}/state`);
      const full = history.get(`backend/${name}/saturation`);
      for (let at = 0; at < history.size; at += 1) {
        if (Number.isNaN(states[at]) || times[at] < low || times[at] > high) continue;
        // Whole pixels: the colour of a pixel shared by two cells would be a mix.
        const [from, to] = [place(times[at]) - cell, place(times[at])].map((x) => Math.round(x * scale) / scale);
        drawCell(ctx, from, row * ROW + 1, Math.max(to - from, 1 / scale), ROW - 2, Math.round(states[at]), full?.[at] ?? 0);
      }
    });
    ctx.fillStyle = colour("text");
    for (const event of this.time.events()) {
      const at = event.at_s + this.time.offset;
      if (at >= low && at <= high) ctx.fillRect(place(at), 0, 1, height);
    }
    ctx.fillStyle = colour("accent");
    if (this.time.moment !== null) ctx.fillRect(place(this.time.moment) - 1, 0, 2, height);
    const all = live ? live.backends.length + live.more_backends : 0;
    const part = all > ROWS_MAX ? `The first ${ROWS_MAX} of ${all} replicas have a history, here and in the plots; the table of replicas has all.` : "";
    put(this.note, names.length ? part : "No replica has been seen yet.");
  }

  close() {
    this.element.remove();
  }
}

function drawCell(ctx, x, y, width, height, state, full) {
  ctx.globalAlpha = 1;
  const hatch = HATCHED[state];
  ctx.fillStyle = hatch ? colour(hatch) : colour("default");
  ctx.globalAlpha = hatch ? 0.35 : 0.08 + 0.92 * Math.min(1, Math.max(0, full));
  ctx.fillRect(x, y, width, height);
  ctx.globalAlpha = 1;
  if (!hatch) return;
  // Lines at fixed places of the plot, so that neighbouring cells form one pattern.
  ctx.save();
  ctx.beginPath();
  ctx.rect(x, y, width, height);
  ctx.clip();
  ctx.strokeStyle = colour(hatch);
  ctx.beginPath();
  for (let at = Math.floor((x - height) / 6) * 6; at < x + width; at += 6) {
    ctx.moveTo(at, y + height);
    ctx.lineTo(at + height, y);
  }
  ctx.stroke();
  ctx.restore();
}

export { STATES };

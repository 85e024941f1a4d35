// A line chart of the last two minutes, with a scale, a time axis and a cursor that all charts share.

import { DASH, element, svg } from "./dom.js";
import { WINDOW } from "./history.js";

const HEIGHT = 148, LEFT = 46, RIGHT = 14, TOP = 8, BOTTOM = 20;  // pixels
const GAP = 5000;  // milliseconds without a sample that interrupt a line
const TIMES = [120, 90, 60, 30, 0];  // seconds ago

let cursor = null;  // milliseconds ago that the pointer is at; null: not over a chart

// About three round steps from 0 to at least `high`.
export function ticks(high) {
  const rough = high / 3, scale = 10 ** Math.floor(Math.log10(rough));
  const step = scale * [1, 2, 2.5, 5, 10].find(factor => factor * scale >= rough * 0.999);
  return Array.from({ length: Math.ceil(high / step - 0.001) + 1 }, (_, index) => index * step);
}

// chart: { title, empty, least, label, tick, lines: [{ name, colour, of, filled }] }. `of` gives a point's value,
// null where there is none; `least` is the smallest top of the scale; `label` writes a value, `tick` one of the scale.
export function draw(card, chart, points) {
  const now = points.at(-1)?.at ?? 0;
  const width = Math.max(240, card.clientWidth - 34);
  const known = chart.lines.map(line => points.map(line.of)).flat().filter(value => value !== null);
  const scale = ticks(Math.max(chart.least, ...known));
  const x = at => width - RIGHT - (now - at) / (1000 * WINDOW) * (width - LEFT - RIGHT);
  const y = value => HEIGHT - BOTTOM - value / scale.at(-1) * (HEIGHT - TOP - BOTTOM);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": chart.title },
    ...axes(chart, scale, x, y, now, width));
  for (const line of [...chart.lines].reverse()) picture.append(...curve(line, points, x, y));
  if (!known.length) picture.append(svg("text", { class: "says", x: (LEFT + width) / 2, y: HEIGHT / 2 - 4 }, chart.empty));
  const pointed = cursor === null ? points.at(-1) : nearest(points, now - cursor);
  if (cursor !== null && pointed) picture.append(svg("line", { class: "cursor", x1: x(pointed.at), x2: x(pointed.at), y1: TOP, y2: y(0) }));
  card.replaceChildren(element("h2", {}, chart.title), legend(chart, pointed), picture);
}

// Lets the pointer over a card move the cursor of all charts; the card outlives the pictures that are drawn in it.
export function follow(card, redraw) {
  card.addEventListener("pointermove", event => {
    const { left, right } = card.querySelector("svg").getBoundingClientRect();
    const share = (right - RIGHT - event.clientX) / (right - left - LEFT - RIGHT);
    cursor = 1000 * WINDOW * Math.min(1, Math.max(0, share));
    redraw();
  });
  card.addEventListener("pointerleave", () => { cursor = null; redraw(); });
}

function axes(chart, scale, x, y, now, width) {
  const rows = scale.map((value, index) => [
    svg("line", { class: index ? "grid" : "base", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
    svg("text", { x: LEFT - 7, y: y(value) + 4, "text-anchor": "end" }, chart.tick(value, scale.at(-1))),
  ]);
  const columns = TIMES.map(ago => {
    return svg("text", { x: x(now - 1000 * ago), y: HEIGHT - 4, "text-anchor": "middle" }, ago ? `−${ago} s` : "now");
  });
  return [...rows.flat(), ...columns];
}

// the line, its area, and a dot where it is a single point
function curve(line, points, x, y) {
  const parts = [];
  let run = [];
  const end = () => {
    if (run.length === 1) parts.push(svg("circle", { class: `dot ${line.colour}`, cx: run[0][0], cy: run[0][1], r: 2 }));
    if (run.length > 1) {
      const path = run.map(([left, top], index) => `${index ? "L" : "M"}${left.toFixed(1)} ${top.toFixed(1)}`).join("");
      const base = `L${run.at(-1)[0].toFixed(1)} ${y(0)}L${run[0][0].toFixed(1)} ${y(0)}Z`;
      if (line.filled) parts.push(svg("path", { class: `area ${line.colour}`, d: path + base }));
      parts.push(svg("path", { class: `line ${line.colour}`, d: path }));
    }
    run = [];
  };
  let before = null;
  for (const point of points) {
    const value = line.of(point);
    if (value === null || (before !== null && point.at - before > GAP)) end();
    if (value !== null) run.push([x(point.at), y(value)]);
    before = point.at;
  }
  end();
  return parts;
}

function legend(chart, point) {
  return element("div", { class: "legend" }, ...chart.lines.map(line => {
    const value = point ? line.of(point) : null;
    return element("span", {}, element("i", { class: line.colour }), `${line.name} `,
      element("b", {}, value === null ? DASH : chart.label(value)));
  }));
}

const nearest = (points, at) => points.reduce((best, point) =>
  best && Math.abs(best.at - at) <= Math.abs(point.at - at) ? best : point, null);

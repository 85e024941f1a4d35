// The panel of a server with --learn: acceptance by segment over time, with the heads that came in, and decisions.

import { DASH, element, number, svg, whole } from "./dom.js";
import { ticks } from "./chart.js";

const HEIGHT = 190, LEFT = 46, RIGHT = 14, TOP = 18, BOTTOM = 20;  // pixels
const COLOURS = ["blue", "orange", "green", "red", "grey"];
const SHOWN = 8;  // decisions in the list
const LABEL = 54;  // pixels of "head 1234" and a gap; of heads that came in closer together, the first is named
const clock = seconds => new Date(1000 * seconds).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });

export function showLearning(state) {
  document.getElementById("learning-card").hidden = false;
  const segments = [...new Set(state.curve.flatMap(point => Object.keys(point.tokens_per_draft)))].sort().slice(0, COLOURS.length);
  const card = document.getElementById("learning");
  card.replaceChildren(facts(state), legend(state, segments), picture(state, segments, Math.max(240, card.clientWidth)), decisions(state));
}

function facts(state) {
  const gain = state.gain === null ? "" : ` · last swap: ${number(state.gain, 2)}× the tokens per second`;
  const phase = state.paused && state.phase === "training" ? "training waits for requests" : state.phase;
  const total = Object.values(state.accepted).reduce((sum, count) => sum + count, 0);
  const shares = Object.entries(state.accepted).sort().map(([name, count]) => `${name} ${whole(100 * count / total)} %`);
  const drafted = total ? ` · accepted tokens: ${shares.join(", ")}` : "";
  return element("p", { class: "empty" }, `${phase} · ${whole(state.rows)} requests kept · head ${state.head} serves · ` +
    `${whole(state.swaps)} swaps, ${whole(state.rollbacks)} rolled back, ${whole(state.rejected)} rejected${gain}${drafted}`);
}

function legend(state, segments) {
  const last = state.curve.at(-1)?.tokens_per_draft ?? {};
  return element("div", { class: "legend" }, ...segments.map((segment, index) => element("span", {},
    element("i", { class: COLOURS[index] }), `${segment || "(no segment)"} `, element("b", {}, segment in last ? number(last[segment], 2) : DASH))));
}

function picture(state, segments, width) {
  const { curve } = state;
  const first = curve[0]?.time ?? 0, last = Math.max(curve.at(-1)?.time ?? 1, first + 1);
  const scale = ticks(Math.max(2, ...curve.flatMap(point => Object.values(point.tokens_per_draft))));
  const x = time => LEFT + (time - first) / (last - first) * (width - LEFT - RIGHT);
  const y = value => HEIGHT - BOTTOM - value / scale.at(-1) * (HEIGHT - TOP - BOTTOM);
  const drawn = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": "Tokens per draft by segment over time" });
  for (const [index, value] of scale.entries()) {
    drawn.append(svg("line", { class: index ? "grid" : "base", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
      svg("text", { x: LEFT - 7, y: y(value) + 4, "text-anchor": "end" }, number(value, 1)));
  }
  if (!curve.length) {
    drawn.append(svg("text", { class: "says", x: (LEFT + width) / 2, y: HEIGHT / 2 }, "not enough drafts yet"));
    return drawn;
  }
  for (const time of [first, last]) drawn.append(svg("text", { x: x(time), y: HEIGHT - 4, "text-anchor": time === first ? "start" : "end" }, clock(time)));
  for (const [index, segment] of segments.entries()) {
    const points = curve.filter(point => segment in point.tokens_per_draft).map(point => [x(point.time), y(point.tokens_per_draft[segment])]);
    drawn.append(...(points.length > 1
      ? [svg("path", { class: `line ${COLOURS[index]}`, d: points.map(([left, top], at) => `${at ? "L" : "M"}${left.toFixed(1)} ${top.toFixed(1)}`).join("") })]
      : points.map(([left, top]) => svg("circle", { class: `dot ${COLOURS[index]}`, cx: left, cy: top, r: 2 }))));
  }
  let labelled = -LABEL;
  for (let at = 1; at < curve.length; at++) {  // a head came in between these two points
    if (curve[at].head === curve[at - 1].head) continue;
    const left = x((curve[at].time + curve[at - 1].time) / 2);
    drawn.append(svg("line", { class: "cursor", x1: left, x2: left, y1: TOP, y2: y(0) }));
    if (left - labelled < LABEL) continue;
    labelled = left;
    drawn.append(svg("text", { x: left, y: TOP - 6, "text-anchor": "middle" }, `head ${curve[at].head}`));
  }
  return drawn;
}

function decisions(state) {
  const rows = state.decisions.slice(-SHOWN).reverse();
  if (!rows.length) return element("p", { class: "empty" }, "No decision yet.");
  return element("table", {}, element("tbody", {}, ...rows.map(row => element("tr", {},
    element("td", { class: "text" }, clock(row.time)), element("td", { class: "text" }, `${row.decision}, head ${row.head ?? DASH}`),
    element("td", { class: "text wrap" }, row.reason ?? "")))));
}

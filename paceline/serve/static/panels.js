// What the page shows: the numbers at the top, the charts, and the tables.

import { DASH, duration, element, number, percent, show, whole } from "./dom.js";
import { failures } from "./history.js";
import { total, values } from "./metrics.js";

const seconds = value => value === 0 ? "0" : value < 1 ? `${number(1000 * value, value < 0.01 ? 1 : 0)} ms` : `${number(value, value < 10 ? 1 : 0)} s`;
const plain = (value, top) => number(value, top < 5 ? 1 : 0);

export const CHARTS = [
  {
    title: "Output, tokens per second", empty: "no tokens yet", least: 10, label: value => number(value), tick: plain,
    lines: [
      { name: "with drafting", colour: "blue", filled: true, of: point => point.output },
      { name: "without (A/B guard)", colour: "grey", of: point => point.plain },
    ],
  },
  {
    title: "Time to first token", empty: "no request in this time", least: 0.01, label: duration, tick: seconds,
    lines: [
      { name: "p50", colour: "blue", of: point => point.firstToken50 },
      { name: "p95", colour: "orange", of: point => point.firstToken95 },
    ],
  },
  {
    title: "Inter-token latency, per step", empty: "no tokens in this time", least: 0.005, label: duration, tick: seconds,
    lines: [
      { name: "p50", colour: "blue", of: point => point.gap50 },
      { name: "p95", colour: "orange", of: point => point.gap95 },
    ],
  },
  {
    title: "Tokens per drafted step", empty: "nothing drafted in this time", least: 2, label: value => number(value, 2), tick: plain,
    lines: [{ name: "accepted (guessed or forced) and bonus token", colour: "green", filled: true, of: point => point.perDraft }],
  },
  {
    title: "Requests", empty: "", least: 3, label: whole, tick: whole,
    lines: [
      { name: "running", colour: "blue", filled: true, of: point => point.running },
      { name: "waiting", colour: "orange", of: point => point.waiting },
    ],
  },
  {
    title: "Answers per second", empty: "", least: 1, label: value => number(value, 1), tick: plain,
    lines: [
      { name: "ok", colour: "green", of: point => point.answers.good },
      { name: "4xx", colour: "orange", of: point => point.answers.client },
      { name: "5xx", colour: "red", of: point => point.answers.server },
    ],
  },
];

export function showServer(read) {
  const { version, model, backend, quantization, drafters, draft_control: control } = read.get("server_info")?.[0]?.labels ?? {};
  const names = drafters?.replaceAll(",", ", "), drafting = control === "auto" ? `auto (${names})` : names;
  const words = [backend, quantization === "auto" ? null : quantization, drafting && `drafting: ${drafting}`, version && `version ${version}`];
  const name = values(read, "num_requests_running", "model_name")[0] ?? model ?? "";
  show("server", element("b", {}, name), words.filter(Boolean).map(word => ` · ${word}`).join(""));
}

export function showNumbers(history) {
  const { read } = history.last, point = history.points.at(-1);
  const failed = failures(read).filter(each => each.status !== "499").reduce((sum, each) => sum + each.count, 0);
  const guesses = rates(read);
  const cards = [
    ["Output", number(point?.output ?? null), "tokens/s", point?.plain ? `${number(point.plain)} without drafting` : ""],
    ["Speedup by drafting", point?.gain ? number(point.gain, 2) : DASH, point?.gain ? "×" : "", point ? point.why ?? "measured" : ""],
    ["Guesses accepted", percent(guesses.share), "", guesses.drafted ? `${whole(guesses.accepted)} of ${whole(guesses.drafted)}` : "nothing drafted yet"],
    ["Running", whole(total(read, "num_requests_running")), "requests", `${whole(total(read, "num_requests_waiting"))} waiting`],
    ["KV cache in use", number(100 * total(read, "kv_cache_usage_perc"), 1), "%", cached(read)],
    ["Errors", whole(failed), "", "since the start", failed ? "bad" : ""],
  ];
  show("numbers", ...cards.map(([name, value, unit, note, state = ""]) => element("div", { class: `card ${state}` },
    element("div", { class: "name" }, name),
    element("div", { class: "value" }, value, unit ? element("small", {}, ` ${unit}`) : null),
    element("div", { class: "note" }, note))));
}

function cached(read) {
  const asked = total(read, "prefix_cache_queries_total");
  return asked ? `${percent(total(read, "prefix_cache_hits_total") / asked)} prefix hits` : "";
}

// guesses of drafters, without what a grammar forced
function rates(read, where = {}) {
  const sum = name => total(read, `spec_decode_num_${name}_tokens_total`, where);
  const forced = sum("forced"), forcedAccepted = sum("accepted_forced");
  const drafted = sum("draft") - forced, accepted = sum("accepted") - forcedAccepted;
  return { drafted, accepted, forced, forcedAccepted, share: drafted > 0 ? accepted / drafted : null };
}

// columns: [heading, cell of a row, class]; the first column and those of class "text" are left-aligned
function table(columns, rows) {
  const side = (index, style) => ({ class: [index ? "" : "text", style].filter(Boolean).join(" ") || null });
  return element("table", {},
    element("thead", {}, element("tr", {}, ...columns.map(([heading, , style], index) => element("th", side(index, style), heading)))),
    element("tbody", {}, ...rows.map(row => element("tr", {}, ...columns.map(([, cell, style], index) => element("td", side(index, style), cell(row)))))));
}

const nothing = words => element("p", { class: "empty" }, words);
export function showReplicas({ replicas, resumed }) {
  document.getElementById("replicas-card").hidden = false;
  const rows = replicas.length ? table([
    ["replica", replica => replica.replica],
    ["model", replica => replica.model, "text"],
    ["host", replica => replica.host, "text"],
    ["process", replica => String(replica.pid)],
    ["running", replica => whole(replica.running)],
    ["waiting", replica => whole(replica.waiting)],
    ["KV cache", replica => percent(replica.kv_cache_usage)],
    ["state", replica => replica.draining ? "draining" : "ready", "text"],
    ["last heard", replica => `${duration(replica.silent_seconds)} ago`],
  ], replicas) : nothing("No replica answers.");
  show("replicas", rows, ...(resumed ? [nothing(`${whole(resumed)} times an answer went on after its replica was lost`)] : []));
}

const SHOWN = 20;  // requests in the list

export function showRequests(requests) {
  if (!requests.length) return show("requests", nothing("No request is running."));
  const more = requests.length - SHOWN;
  show("requests", table([
    ["request", each => element("code", { title: each.id }, each.id.slice(0, 8) + (each.index ? `#${each.index}` : ""))],
    ["segment", each => each.segment || DASH, "text wide"],
    ["state", each => each.state, "text wide"],
    ["drafter", each => each.drafter ?? DASH, "text"],
    ["prompt", each => whole(each.prompt_tokens), "wide"],
    ["tokens", each => `${whole(each.output_tokens)} / ${whole(each.max_output_tokens)}`],
    ["tokens/s", each => number(each.tokens_per_second, 1)],
    ["age", each => duration(each.age_seconds)],
  ], requests.slice(0, SHOWN)), ...(more > 0 ? [nothing(`and ${whole(more)} more`)] : []));
}

export function showDrafters(read) {
  const rows = values(read, "spec_decode_num_drafts_total", "drafter")
    .map(drafter => ({ drafter, ...rates(read, { drafter }), drafts: total(read, "spec_decode_num_drafts_total", { drafter }) }));
  const guessing = rows.filter(row => row.drafted > 0), all = rates(read);
  if (all.forced) guessing.push({ drafter: "forced by a grammar", drafts: null, drafted: all.forced, accepted: all.forcedAccepted, share: all.forcedAccepted / all.forced });
  if (!guessing.length) return show("drafters", nothing("Nothing was drafted yet."));
  show("drafters", table([
    ["drafter", row => row.drafter],
    ["drafts", row => row.drafts === null ? DASH : whole(row.drafts), "wide"],
    ["drafted", row => whole(row.drafted)],
    ["accepted", row => whole(row.accepted)],
    ["rate", row => percent(row.share)],
    ["per draft", row => row.drafts === null ? DASH : number(row.accepted / row.drafts, 2), "wide"],
  ], guessing));
}

export function showPositions(read) {
  const name = kind => `spec_decode_num_${kind}_tokens_per_pos_total`;
  const positions = values(read, name("draft"), "position").sort((a, b) => a - b).slice(0, 10);
  if (!positions.length) return show("positions", nothing("Nothing was drafted yet."));
  const { forced } = rates(read);
  const note = forced ? [nothing(`Includes ${whole(forced)} tokens that a grammar forced: they are not guesses.`)] : [];
  show("positions", ...note, element("div", { class: "bars" }, ...positions.flatMap(position => {
    const drafted = total(read, name("draft"), { position });
    const share = drafted ? total(read, name("accepted"), { position }) / drafted : 0;
    const bar = element("i");
    bar.style.width = `${100 * share}%`;
    return [element("b", {}, String(Number(position) + 1)), element("div", { class: "track" }, bar), element("span", {}, percent(share))];
  })));
}

export function showSegments(history) {
  const { read } = history.last;
  const segments = values(read, "generation_tokens_total", "segment").filter(segment => total(read, "generation_tokens_total", { segment }));
  if (!segments.length) return show("segments", nothing("No tokens were generated yet."));
  const poor = new Set(values(read, "control_poor_segment", "segment"));
  const label = segment => element("span", {}, segment || "(none)", poor.has(segment) ? element("span", { class: "badge" }, "gains little") : null);
  const perDraft = segment => {
    const drafts = total(read, "spec_decode_num_drafts_total", { segment });
    return drafts ? number(1 + total(read, "spec_decode_num_accepted_tokens_total", { segment }) / drafts, 2) : DASH;
  };
  show("segments", table([
    ["segment", label],
    ["outputs", segment => whole(total(read, "request_success_total", { segment })), "wide"],
    ["tokens", segment => whole(total(read, "generation_tokens_total", { segment }))],
    ["guesses accepted", segment => percent(rates(read, { segment }).share)],
    ["forced", segment => whole(rates(read, { segment }).forcedAccepted), "wide"],
    ["tokens/step", perDraft],
  ], segments));
}

const MEANING = {
  400: "wrong request", 401: "wrong key", 404: "no such path or model", 405: "wrong method", 408: "request came too slowly", 413: "body too large",
  415: "not JSON", 422: "wrong request", 429: "too many requests", 431: "headers too large", 499: "client left", 500: "failed pass", 503: "stopping, stuck or full", 504: "took too long",
};

export function showErrors(read) {
  const rows = failures(read).map(each => ({ what: each.path || "(no such path)", status: each.status, meaning: MEANING[each.status] ?? "", count: each.count }));
  const counted = [["engine", "failed passes", "engine_failed_steps_total"], ["drafters", "failed calls, decoded without", "draft_failures_total"]];
  for (const [what, meaning, name] of counted) {
    const count = total(read, name);
    if (count) rows.push({ what, status: "", meaning, count });
  }
  if (!rows.length) return show("errors", nothing("None since the start."));
  show("errors", table([
    ["where", row => row.what],
    ["status", row => row.status || DASH],
    ["meaning", row => row.meaning, "text wide"],
    ["count", row => whole(row.count)],
  ], rows));
}

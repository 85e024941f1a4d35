// The last two minutes: what each sample of /metrics says about the moments before it.

import { gained, gauge, quantile, rate, total, values } from "./metrics.js";

export const WINDOW = 120;  // seconds that charts show
const RATE_SECONDS = 3;  // rates are means over this time
const LATENCY_SECONDS = 10;  // quantiles are of this time: a few requests must fall into it
const DRAFTED = new Set(["gain", "probe"]);  // reasons of steps in which something is drafted: docs/design/control.md
const WATCHED = new Set(["/metrics", "/requests", "/replicas", "/learn", "/health", "/", "/static/{name}"]);  // this page's own requests

export class History {
  #samples = [];  // { at, read }, oldest first
  points = [];  // { at, output, ... }: one for each sample but the first

  add(at, read) {
    const sample = { at, read };
    if (this.#samples.length) this.points.push(this.#point(sample));
    this.#samples.push(sample);
    const oldest = at - 1000 * (WINDOW + LATENCY_SECONDS);
    while (this.#samples[0].at < oldest) this.#samples.shift();
    while (this.points.length && this.points[0].at < at - 1000 * WINDOW) this.points.shift();
  }

  get last() { return this.#samples.at(-1); }

  // the newest sample that is at least this old; the oldest if none is
  #before(at, seconds) {
    return this.#samples.findLast(sample => sample.at <= at - 1000 * seconds) ?? this.#samples[0];
  }

  #point(to) {
    const recent = this.#before(to.at, RATE_SECONDS), earlier = this.#before(to.at, LATENCY_SECONDS);
    const drafts = gained(recent, to, "spec_decode_num_drafts_total");
    const tokens = rate(recent, to, "generation_tokens_total");
    const latency = (name, share) => quantile(earlier, to, name, share);
    return {
      at: to.at,
      output: tokens,
      ...speculation(recent, to, tokens),
      perDraft: drafts ? 1 + gained(recent, to, "spec_decode_num_accepted_tokens_total") / drafts : null,
      firstToken50: latency("time_to_first_token_seconds", 0.5),
      firstToken95: latency("time_to_first_token_seconds", 0.95),
      gap50: latency("inter_token_latency_seconds", 0.5),
      gap95: latency("inter_token_latency_seconds", 0.95),
      running: total(to.read, "num_requests_running"),
      waiting: total(to.read, "num_requests_waiting"),
      answers: answered(recent, to),
    };
  }
}

// what speculation gains, by the controller's own A/B test; `why` says why there is no figure
function speculation(from, to, tokens) {
  const unknown = why => ({ gain: null, plain: null, why });
  if (values(to.read, "server_info", "drafters")[0] === "off") return unknown("drafting is off");
  if (!total(to.read, "engine_steps_total")) return unknown("not measured yet");
  const reasons = values(to.read, "control_steps_total", "reason");
  if (!reasons.length) return unknown("needs --draft auto");
  const steps = reason => gained(from, to, "control_steps_total", { reason });
  const drafted = reasons.filter(reason => DRAFTED.has(reason)).reduce((sum, reason) => sum + steps(reason), 0);
  const undrafted = steps("no gain") + steps("stopped");
  const gain = gauge(to.read, "control_gain");
  if (undrafted > drafted) return { gain: 1, plain: tokens, why: steps("stopped") ? "stopped: it was slower" : "no draft would gain now" };
  return gain === null ? unknown("not measured yet") : { gain, plain: tokens / gain, why: null };
}

// answers to clients per second, by kind
function answered(from, to) {
  const sums = { good: 0, client: 0, server: 0 };
  for (const path of values(to.read, "http_requests_total", "path")) {
    if (WATCHED.has(path)) continue;
    for (const status of values(to.read, "http_requests_total", "status")) {
      sums[kind(status)] += rate(from, to, "http_requests_total", { path, status });
    }
  }
  return sums;
}

const kind = status => status < 400 || status === "499" ? "good" : status < 500 ? "client" : "server";

// [{ path, status, count }] of what went wrong since the server's start, the most frequent first
export function failures(read) {
  return (read.get("http_requests_total") ?? [])
    .filter(({ labels, value }) => value && labels.status >= 400)
    .map(({ labels, value }) => ({ path: labels.path, status: labels.status, count: value }))
    .sort((a, b) => b.count - a.count);
}

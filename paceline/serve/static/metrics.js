// Prometheus text to numbers: totals, rates and quantiles between two samples.

const PREFIX = "paceline:";

// name -> [{ labels, value }], for the metrics of this server
export function parse(text) {
  const read = new Map();
  for (const line of text.split("\n")) {
    const match = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!match || !match[1].startsWith(PREFIX)) continue;
    const labels = {};
    for (const [, key, value] of (match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[key] = value;
    const name = match[1].slice(PREFIX.length);
    if (!read.has(name)) read.set(name, []);
    read.get(name).push({ labels, value: Number(match[3]) });
  }
  return read;
}

const fits = (labels, where) => Object.entries(where).every(([key, value]) => labels[key] === value);

// the sum of a metric over all its labels, or over those that fit
export function total(read, name, where = {}) {
  return (read.get(name) ?? []).reduce((sum, each) => fits(each.labels, where) ? sum + each.value : sum, 0);
}

// a gauge that may be absent
export const gauge = (read, name) => read.get(name)?.[0]?.value ?? null;

// the different values of a label
export function values(read, name, label) {
  return [...new Set((read.get(name) ?? []).map(each => each.labels[label]))].filter(value => value !== undefined);
}

// what a counter gained from one sample to a later one; a restarted server begins again at 0
export function gained(from, to, name, where) {
  const now = total(to.read, name, where), before = total(from.read, name, where);
  return now < before ? now : now - before;
}

export const rate = (from, to, name, where) => gained(from, to, name, where) / Math.max(0.001, (to.at - from.at) / 1000);

// a quantile of what a histogram counted between two samples, interpolated within its bucket; null: nothing
export function quantile(from, to, name, share) {
  const edges = values(to.read, `${name}_bucket`, "le");
  const buckets = edges
    .map(edge => [edge === "+Inf" ? Infinity : Number(edge), gained(from, to, `${name}_bucket`, { le: edge })])
    .sort((a, b) => a[0] - b[0]);
  const count = buckets.at(-1)?.[1] ?? 0;
  if (!count) return null;
  let low = 0, below = 0;
  for (const [edge, reached] of buckets) {
    if (reached >= share * count) {
      return edge === Infinity ? low : low + (edge - low) * (share * count - below) / Math.max(1e-9, reached - below);
    }
    [low, below] = [edge, reached];
  }
  return low;
}

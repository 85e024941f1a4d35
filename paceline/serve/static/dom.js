// Elements from plain values. Text is always set as text: nothing of the server becomes HTML.

const SVG = "http://www.w3.org/2000/svg";

// element("td", { class: "text" }, "a", child, ...)
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) if (value !== null) node.setAttribute(name, value);
  node.append(...children.filter(child => child !== null));
  return node;
}

export function show(id, ...children) {
  document.getElementById(id).replaceChildren(...children);
}

export const DASH = "–";

// 0.0123 -> "0.012", 1.62 -> "1.62", 48.23 -> "48.2", 1234.5 -> "1,235"
export function number(value, digits = null) {
  if (value === null || !Number.isFinite(value)) return DASH;
  const size = Math.abs(value);
  const shown = digits ?? (size === 0 || size >= 100 ? 0 : size >= 10 ? 1 : size >= 0.1 ? 2 : 3);
  return value.toLocaleString("en", { minimumFractionDigits: shown, maximumFractionDigits: shown });
}

export const whole = value => number(value, 0);
export const percent = share => share === null ? DASH : `${whole(100 * share)} %`;

// seconds in the unit that a person would use
export function duration(seconds) {
  if (seconds === null) return DASH;
  if (seconds < 1) return `${number(1000 * seconds, seconds < 0.0995 ? 1 : 0)} ms`;
  if (seconds < 100) return `${number(seconds, 1)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 100 ? `${minutes} min ${whole(seconds % 60)} s` : `${whole(minutes / 60)} h`;
}

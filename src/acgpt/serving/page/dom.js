// Elements without HTML strings: every text becomes a text node, so that no text is ever read as HTML.

export const $ = (id) => document.getElementById(id);

/** Make an element: h("button", {type: "button", class: "small", onclick: accept}, "Accept"). */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Make an element of SVG. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Replace what is in an element. */
export function show(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
}

/** A token on one line, with visible white space and control characters; its id if it has no text. */
export function visible(text, id) {
  if (!text) return `#${id}`;
  const spaces = text.replace(/ /g, "␣").replace(/\r?\n/g, "⏎").replace(/\t/g, "⇥");
  return spaces
    .replace(/[\0-\x1f]/g, (control) => String.fromCharCode(0x2400 + control.charCodeAt(0)))
    .replace(/[\p{Z}\p{C}]/gu, (other) => `U+${other.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`);
}

/** A probability; JSON has no infinity, so that the logarithm of 0 is null. */
export const probabilityOf = (logProb) => Math.exp(logProb ?? -Infinity);

export function percent(probability) {
  if (probability >= 0.0995) return `${(100 * probability).toFixed(0)} %`;
  if (probability >= 0.00995) return `${(100 * probability).toFixed(1)} %`;
  if (probability >= 0.00095) return `${(100 * probability).toFixed(2)} %`;
  return probability >= 0.000005 ? `${(100 * probability).toFixed(3)} %` : "≈ 0 %";
}

/** A bar for a probability; its number is written beside it, so it is hidden from screen readers. */
export function bar(probability, kind) {
  const inner = h("span", { class: `bar ${kind}` });
  inner.style.width = `${Math.max(1, 100 * probability)}%`;
  return h("span", { class: "track", "aria-hidden": "true" }, inner);
}

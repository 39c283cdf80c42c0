// What several views show: the two ways of reading side by side, alternatives, probabilities, and what colours mean.

import { h } from "./dom.js";

export const KINDS = { future: "With the future", past: "Past only" };
const DIGITS = [0.0995, 0.00995, 0.00095, 0.000005]; // probabilities whose percentage has 0, 1, 2 and 3 decimals

export const kindsShown = (compare) => (compare ? ["future", "past"] : ["future"]);
export const inWords = (kind) => KINDS[kind].toLowerCase();
export const hint = (text) => h("p.hint", text);

/** The column of a kind; `aside` stands beside its title. */
export const column = (kind, aside, ...children) =>
  h(`section.column.${kind}`, { "aria-label": KINDS[kind] }, h("h3", KINDS[kind], aside), children);

/** An entry of a list of alternatives; the last arguments are measures. */
export const alternative = (text, onclick, key, count, ...measures) =>
  h(
    "li",
    h("button", { type: "button", onclick }, text || "(nothing)", h("span.hidden", ": accept"), key),
    h("span.count", count),
    measures,
  );

/** A probability as a bar and as a number; the bar is hidden from screen readers. */
export function measure(probability, kind, note) {
  const bar = h(`span.bar.${kind}`);
  bar.style.width = `${Math.max(1, 100 * probability)}%`;
  const number = h("span.number", percent(probability), note && h("small", ` ${note}`));
  return h("span.measure", h("span.track", { "aria-hidden": "true" }, bar), number);
}

/** What colours mean: the class of each, and words. */
export function legend(entries) {
  const rows = entries.map(([name, words]) => h("li", h(`span.swatch.${name}`, { "aria-hidden": "true" }), words));
  return h("ul.legend", { "aria-label": "Colours" }, rows);
}

/** A probability; JSON has no infinity, so that the logarithm of 0 is null. */
export const probabilityOf = (logProb) => Math.exp(logProb ?? -Infinity);

export function percent(probability) {
  const digits = DIGITS.findIndex((least) => probability >= least);
  return digits < 0 ? "≈ 0 %" : `${(100 * probability).toFixed(digits)} %`;
}

/** A token on one line, with visible white space and control characters; its id if it has no text. */
export function visible(text, id) {
  if (!text) return `#${id}`;
  const spaces = text.replace(/ /g, "␣").replace(/\r?\n/g, "⏎").replace(/\t/g, "⇥");
  return spaces
    .replace(/[\0-\x1f]/g, (control) => String.fromCharCode(0x2400 + control.charCodeAt(0)))
    .replace(/[\p{Z}\p{C}]/gu, (other) => `U+${other.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`);
}

// The two ways of reading a text, which the views show side by side.

import { h } from "./dom.js";

export const KINDS = { future: "With the future", past: "Past only" };

export const kindsShown = (compare) => (compare ? ["future", "past"] : ["future"]);
export const inWords = (kind) => KINDS[kind].toLowerCase();

/** The column of a kind; `aside` stands beside its title. */
export function column(kind, aside, ...children) {
  return h(
    "section",
    { class: `column ${kind}`, "aria-label": KINDS[kind] },
    h("h3", {}, KINDS[kind], aside),
    ...children,
  );
}

// Rank alternatives: those of the slots {{a|b}}, or those that are typed for the selected words.

import { post } from "./api.js";
import { $, bar, h, percent, show } from "./dom.js";
import * as editor from "./editor.js";
import { column, kindsShown } from "./kinds.js";
import { complete, escapeSlot, has, parse, past, slots, write } from "./template.js";

const COMPARED = {
  "whole text": "By the probability of the whole text.",
  "asked | given": "By the probability of the words, given the text around them.",
};

const lines = $("lines");

export const inputs = { lines };
export const label = "Rank";
export const ready = (parts) => alone(parts) || Boolean(lines.value.trim());
export const alone = (parts) => has(parts, "alternatives");
export const missing = "There is nothing to rank: select a word and type alternatives, or write {{cat|dog}}.";

/** Hide the field if the text has alternatives of its own: they are ranked. */
export function follow(parts) {
  $("alternatives").hidden = Boolean(parts && alone(parts));
}

/** Ask the model for alternatives: what fits in place of the selected words. */
export async function suggest({ signal }) {
  const words = editor.selection().trim();
  if (!words) throw new Error("Select a word in the text first.");
  const { before, after } = editor.around();
  const body = { template: `${before}{{_}}${after}`, n: 5, max_tokens: 4, future: true };
  const {
    results: [fills],
  } = await post("v1/fill", body, signal);
  const slot = slots(parse(before)).length; // its number
  const suggested = fills.map((fill) => fill.fills[slot].trim()).filter((text) => text && text !== words);
  lines.value = [...new Set([...typed(), ...suggested])].join("\n");
  lines.dispatchEvent(new Event("input"));
}

const typed = () =>
  lines.value
    .split("\n")
    .map((line) => line.trim())
    .filter(Boolean);

/** The slot with the selected words and what was typed for them. */
function slotOf(words) {
  if (!words) throw new Error("Select the words in the text that the alternatives replace.");
  return `{{${[...new Set([words, ...typed()])].map(escapeSlot).join("|")}}}`;
}

/** What is ranked with the future. */
export function question({ parts }) {
  const { before, after } = editor.around();
  const template = has(parts, "alternatives") ? write(parts) : before + slotOf(editor.selection().trim()) + after;
  return { path: "v1/rank", body: { template, future: true }, template };
}

export async function run({ parts, compare, signal }) {
  if (!has(parts, "alternatives")) {
    editor.replaceSelection(() => slotOf(editor.selection().trim()));
    return; // the text has changed, which ranks it
  }
  const kinds = kindsShown(compare);
  const bodies = {
    future: question({ parts }).body,
    past: { template: write(past(parts)), future: false }, // without what follows
  };
  show(
    $("rankings"),
    await Promise.all(
      kinds.map(async (kind) => {
        const {
          results: [ranking],
        } = await post("v1/rank", bodies[kind], signal);
        return column(
          kind,
          null,
          h(
            "p",
            { class: "hint" },
            kind === "past" ? "By the probability of the text up to here." : COMPARED[ranking.compared],
          ),
          h(
            "ol",
            { class: "alternatives" },
            ranking.alternatives.map((alternative) => row(alternative, kind, parts)),
          ),
        );
      }),
    ),
  );
}

function row({ choice, probability, log_prob }, kind, parts) {
  const text = choice.map((each) => each || "(nothing)").join(" … ");
  return h(
    "li",
    {},
    h(
      "button",
      { type: "button", onclick: () => editor.accept(complete(parts, choice)) },
      text,
      h("span", { class: "hidden" }, ": accept"),
    ),
    h("span", { class: "count" }, `log p ${log_prob === null ? "−∞" : log_prob.toFixed(2).replace("-", "−")}`),
    h("span", { class: "measure" }, bar(probability, kind), h("span", { class: "number" }, percent(probability))),
  );
}

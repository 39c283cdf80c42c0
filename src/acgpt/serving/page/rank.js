// Rank alternatives: those of the slots {{a|b}}, or those that are typed for the selected words.

import { post } from "./api.js";
import { $, h, show } from "./dom.js";
import * as editor from "./editor.js";
import { alternative, column, hint, kindsShown, measure } from "./parts.js";
import { complete, escapeSlot, parse, past, slots, write } from "./template.js";

const COMPARED = {
  "whole text": "By the probability of the whole text.",
  "asked | given": "By the probability of the words, given the text around them.",
};
const lines = $("lines");

export const inputs = { lines };
export const label = "Rank";
export const ready = (parts) => alone(parts) || typed().length > 0;
export const alone = (parts) => slots(parts).some(({ kind }) => kind === "alternatives");
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
  const body = { template: `${before}{{_}}${after}`, n: 5, max_tokens: 8, future: true };
  const [fills] = (await post("v1/fill", body, signal)).results;
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
function proposed() {
  const words = editor.selection().trim();
  if (!words) throw new Error("Select the words in the text that the alternatives replace.");
  return `{{${[...new Set([words, ...typed()])].map(escapeSlot).join("|")}}}`;
}

/** What is ranked with the future. */
export function question({ parts }) {
  const { before, after } = editor.around();
  const template = alone(parts) ? write(parts) : before + proposed() + after;
  return { path: "v1/rank", body: { template, future: true }, template };
}

export async function run({ parts, compare, signal }) {
  if (!alone(parts)) return editor.replaceSelection(proposed()); // the text has changed, which ranks it
  const bodies = {
    future: question({ parts }).body,
    past: { template: write(past(parts)), future: false }, // without what follows
  };
  const rankings = kindsShown(compare).map(async (kind) => {
    const [{ compared, alternatives }] = (await post("v1/rank", bodies[kind], signal)).results;
    const rows = alternatives.map((each) => row(each, kind, parts));
    const about = kind === "past" ? "By the probability of the text up to here." : COMPARED[compared];
    return column(kind, null, hint(about), h("ol.alternatives", rows));
  });
  show($("rankings"), await Promise.all(rankings));
}

function row({ choice, probability, log_prob }, kind, parts) {
  const text = choice.map((each) => each || "(nothing)").join(" … ");
  const accept = () => editor.accept(complete(parts, choice));
  const score = `log p ${log_prob === null ? "−∞" : log_prob.toFixed(2).replace("-", "−")}`;
  return alternative(text, accept, null, score, measure(probability, kind));
}

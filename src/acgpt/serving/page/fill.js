// Fill the gaps: with the future, and from the past only. The first fill streams in, then the alternatives come.
//
//   with the future   the whole text is read
//   past only         the text ends at the last gap
//
// All fills of a column have as many tokens as the best one, so that their probabilities can be compared. They are
// listed by these probabilities.

import { Away, post, stream } from "./api.js";
import { $, h, show } from "./dom.js";
import { accept } from "./editor.js";
import { alternative, column as section, hint, inWords, kindsShown, measure, percent, probabilityOf } from "./parts.js";
import { complete, escapeSlot, isSlot, mapSlots, past, shorten, slots, write } from "./template.js";

const MOST = 5; // alternatives
const DRAWING = { best_of: 16, temperature: 0.8, top_p: 0.95, seed: 0 }; // the candidates, of which they are the best
const RARE = 1 / 1000; // of the best one's probability: less probable alternatives are not listed
const CONTEXT = 90; // characters of given text that are shown beside a gap
const LONG = 4000; // characters from which on alternatives are not scored a second time

const isGap = ({ kind }) => kind === "gap" || kind === "blank"; // what is filled; other slots stay as they are
const longest = $("longest");

export const inputs = { longest };
export const label = "Fill";
export const ready = (parts) => slots(parts).some(isGap);
export const missing = "There is no gap to fill: select words and make them a gap, or type {{_}}.";

let columns = {}; // of the last run
let filled = {}; // the last text that was filled, and its template with the lengths of the best fill

/** Accept the n-th alternative with the future. */
export function choose(n) {
  columns.future?.rows.children[n - 1]?.querySelector("button")?.click();
}

export async function run({ parts, compare, signal }) {
  columns = Object.fromEntries(kindsShown(compare).map((kind) => [kind, column(kind, parts)]));
  const { future, past: blind } = columns;
  show($("fills"), future.element, blind?.element);
  show($("verdict"));
  $("verdict").hidden = !compare;

  const first = await fillOne(future, { ...searched(parts), future: true }, signal);
  filled = { text: write(parts), template: write(withLengths(parts, first.lengths)) };
  const alternatives = fillMore(future, parts, listed(filled.template, true), signal);
  if (!compare) return alternatives;
  const template = write(past(withLengths(parts, wordLengths(parts, first))));
  const fillPast = async () => {
    await fillOne(blind, { template, future: false }, signal);
    return fillMore(blind, parts, listed(template, false), signal);
  };
  const [own, others] = await Promise.all([alternatives, fillPast()]);
  list(future, parts, joined("future", own, others));
  list(blind, parts, joined("past", others, own));
}

/** The fills of a column, and those of the other one that have the length of its best, without repetitions. */
function joined(kind, own, others) {
  const known = own.map(({ words }) => words);
  const fits = (entry) => entry[kind] !== undefined && entry.tokens === own[0].tokens && !known.includes(entry.words);
  return [...own, ...others.filter(fits)];
}

/** What is listed with the future: fills of the length that the best one had; of any length, if it is not known. */
export function question({ parts }) {
  const template = write(parts);
  if (filled.text === template) return { path: "v1/fill", body: listed(filled.template, true), template };
  const { template: any, max_tokens } = searched(parts);
  return { path: "v1/fill", body: { ...listed(any, true), max_tokens }, template };
}

/** The request for the best fill, of any length: its template, and the maximum number of tokens. */
function searched(parts) {
  const gapped = parts.map((part) => (part.kind === "blank" ? ofLength(part, part.tokens) : part));
  const bounds = parts.filter(isGap).map((part) => Number(part.most ?? part.least ?? part.tokens));
  return { template: write(gapped), max_tokens: Math.max(1, Number(longest.value) || Number(longest.defaultValue), ...bounds) };
}

/** The request for a list of fills. */
const listed = (template, future) => ({ template, n: MOST, future, ...DRAWING });

/** A gap or a blank as a gap of so many tokens. */
const ofLength = (part, tokens) => ({
  ...part,
  source: part.source.replace(/^\{\{_[0-9]*(?:-[0-9]+)?/, `{{_${tokens}-${tokens}`),
});

/** The parts with gaps of these lengths; gaps side by side are filled as one, and have no lengths of their own. */
function withLengths(parts, lengths) {
  const gaps = parts.filter(isGap);
  if (gaps.length !== lengths.length) return parts;
  return parts.map((part) => (isGap(part) ? ofLength(part, Math.max(1, lengths[gaps.indexOf(part)])) : part));
}

/**
 * The lengths of a fill, where the last gap has only the tokens of its words: those after them spell the text that
 * follows, which past only does not read.
 */
function wordLengths(parts, { lengths, tokens, fills }) {
  if (!isGap(slots(parts).at(-1))) return lengths;
  const drawn = tokens.slice(tokens.length - lengths.at(-1)).map((token) => token.text);
  const words = drawn.findIndex((_, i) =>
    drawn
      .slice(0, i + 1)
      .join("")
      .includes(fills.at(-1)),
  );
  return words < 0 ? lengths : [...lengths.slice(0, -1), words + 1];
}

/** Stream one fill into the text of a column. */
async function fillOne(target, body, signal) {
  let fill;
  for await (const piece of stream("v1/fill", body, signal)) {
    target.gaps[piece.slot]?.append(piece.text);
    fill = piece.fill ?? fill;
  }
  if (!fill) throw new Away("The server has stopped answering."); // a proxy may end a broken stream cleanly
  preview(target, fill);
  return fill;
}

const preview = ({ gaps }, { fills }) => gaps.forEach((gap, i) => show(gap, fills[i]));

/** List the best fills with the probabilities that both ways of reading give them, and return them. */
async function fillMore(target, parts, body, signal) {
  const [fills] = (await post("v1/fill", body, signal)).results;
  const entries = fills.map((fill) => {
    const kept = fill.fills.map((text, i) => (isGap(slots(parts)[i]) ? text : null));
    const words = kept.filter((text) => text !== null).join(" … ");
    return { fill, kept, words, tokens: fill.tokens.length };
  });
  const queries = fills.map((fill) => scored(parts, fill.fills));
  const score = async (kind) => {
    const { results } = await post("v1/log_prob", { query: queries, future: kind === "future" }, signal);
    results.forEach(({ log_prob, tokens }, i) =>
      Object.assign(entries[i], { [kind]: log_prob, tokens: tokens.length }),
    );
  };
  if (queries.includes(null) || parts.map((part) => part.text ?? "").join("").length > LONG)
    for (const entry of entries) entry[target.kind] = entry.fill.log_prob;
  else await Promise.all(Object.keys(columns).map(score));
  list(target, parts, entries);
  return entries;
}

/** List fills in a column, the most probable ones first. */
function list(target, parts, entries) {
  const own = (entry) => probabilityOf(entry[target.kind]);
  entries.sort((a, b) => own(b) - own(a));
  const best = entries[0];
  preview(target, best.fill);
  const shown = entries.filter((entry) => own(entry) >= RARE * own(best)).slice(0, MOST);
  show(
    target.rows,
    shown.map((entry, i) => row(entry, i, target.kind, parts)),
  );
  if (target.kind === "future") show($("verdict"), verdict(best, parts));
}

/** What reading the future does to the probability of the best words. */
function verdict({ words, future, past }, parts) {
  if (isSlot(parts.at(-1))) return "Nothing comes after the gap, so there is no future to read.";
  const [now, before] = [future, past].map(probabilityOf);
  if (past === undefined || !before) return null;
  const times = now / before;
  const number = times < 10 ? times.toFixed(1) : Number(times.toPrecision(2)).toLocaleString("en");
  return [
    `What comes after the ${slots(parts).length > 1 ? "last " : ""}gap makes `,
    h("strong", `“${words}”`),
    times >= 1 ? ` ${number} times as probable: ` : " less probable: ",
    `${percent(now)} instead of ${percent(before)}.`,
  ];
}

/** The template that asks for the probability of a fill; null if a gap is empty. */
function scored(parts, fills) {
  const asked = mapSlots(parts, (slot, i) =>
    slot.kind === "unknown" ? slot : { ...slot, source: fills[i] && `{{${escapeSlot(fills[i])}}}` },
  );
  return asked.some((part) => part.source === "") ? null : write(asked);
}

function column(kind, parts) {
  const gaps = slots(parts).map(() => h(`mark.${kind}`));
  const read = kind === "past" ? past(parts).length : parts.length;
  const text = mapSlots(shorten(parts, CONTEXT), (_, i) => gaps[i]).map((part, i) => {
    if (gaps.includes(part)) return part;
    return i < read ? part.text : h("del", { title: "not read" }, part.text);
  });
  const rows = h("ol.alternatives", { "aria-label": `Alternatives, ${inWords(kind)}` });
  const element = section(
    kind,
    null,
    hint(kind === "past" ? "What is crossed out is not read." : "All of the text is read."),
    h("p.preview", { "aria-live": "polite" }, text),
    h("p.hint.waiting", "Other words follow …"),
    rows,
  );
  return { kind, element, gaps, rows };
}

function row(entry, index, kind, parts) {
  const kinds = kind === "future" ? ["future", "past"] : ["past", "future"];
  const key = kind === "future" && h("kbd", { "data-key": "mod", "aria-hidden": "true" }, String(index + 1));
  const count = `${entry.tokens} token${entry.tokens === 1 ? "" : "s"}`;
  const measures = kinds
    .filter((name) => entry[name] !== undefined)
    .map((name) => measure(probabilityOf(entry[name]), name, inWords(name)));
  return alternative(entry.words, () => accept(complete(parts, entry.kept)), key, count, measures);
}

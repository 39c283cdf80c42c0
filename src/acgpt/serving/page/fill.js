// Fill the gaps: with the future, and from the past only. The first fill streams in, then the alternatives come.
//
//   with the future   the whole text is read
//   past only         the text ends at the last gap, and the gap is as long as the one beside it, so that the
//                     probabilities can be compared

import { post, stream } from "./api.js";
import { bar, h, percent, probabilityOf, show } from "./dom.js";
import { column as section, inWords, kindsShown } from "./kinds.js";
import { complete, escapeSlot, past, slots, write } from "./template.js";

const MOST = 5; // alternatives
const DRAWING = { best_of: 16, temperature: 0.7, top_p: 0.9 }; // the candidates, of which they are the best
const CONTEXT = 90; // characters of given text that are shown beside a gap
const LONG = 4000; // characters from which on alternatives are not scored a second time
const EXPLANATION =
  "Blank a word or a few, then fill. One column reads all of the text, the other one only what comes before the gap.";

const isGap = ({ kind }) => kind === "gap" || kind === "blank"; // what is filled; other slots stay as they are

let panel,
  accept,
  columns = {};
const longest = h("input", { id: "longest", type: "number", min: 1, max: 64, value: 4, inputmode: "numeric" });

export const inputs = { longest };
export const label = () => "Fill";

export function start(element, onaccept) {
  panel = element;
  accept = onaccept;
  show(
    panel,
    h("p", { class: "hint empty" }, EXPLANATION),
    h("div", { class: "columns" }),
    h(
      "p",
      { class: "hint" },
      h("label", { for: "longest" }, "Longest gap in tokens "),
      longest,
      " A percentage is the probability of the words, given how many tokens they have.",
    ),
  );
}

/** Accept the n-th alternative with the future. */
export function choose(n) {
  columns.future?.rows.children[n - 1]?.querySelector("button")?.click();
}

export async function run({ parts, compare, signal }) {
  const gapped = parts.map((part) =>
    part.kind === "blank"
      ? { ...part, kind: "gap", most: part.tokens, source: `{{_${part.tokens}-${part.tokens}}}` }
      : part,
  );
  const bounds = gapped.filter((part) => part.kind === "gap").map((part) => Number(part.most ?? part.least));
  const options = { max_tokens: Math.max(1, Number(longest.value) || 4, ...bounds) };
  const kinds = kindsShown(compare);
  columns = Object.fromEntries(kinds.map((kind) => [kind, column(kind, parts)]));
  show(
    panel.querySelector(".columns"),
    kinds.map((kind) => columns[kind].element),
  );
  panel.querySelector(".empty")?.remove();

  const first = await fillOne(columns.future, write(gapped), { ...options, future: true }, signal);
  const jobs = [fillMore(columns.future, parts, write(gapped), { ...options, future: true, ...DRAWING }, signal)];
  if (compare) {
    // As long as the fill with the future, and without what follows.
    const lengths = [...first.lengths];
    const before = past(gapped).map((part) => {
      if (part.kind !== "gap") return part;
      const length = Math.max(1, lengths.shift() ?? 1);
      return { ...part, source: `{{_${length}-${length}}}` };
    });
    jobs.push(
      fillOne(columns.past, write(before), { future: false }, signal).then(() =>
        fillMore(columns.past, parts, write(before), { future: false, ...DRAWING }, signal),
      ),
    );
  }
  await Promise.all(jobs);
}

/** Stream one fill into the text of a column. */
async function fillOne(target, template, options, signal) {
  let fill;
  for await (const piece of stream("v1/fill", { template, ...options }, signal)) {
    target.gaps[piece.slot]?.append(piece.text);
    fill = piece.fill ?? fill;
  }
  target.gaps.forEach((gap, i) => show(gap, fill.fills[i] ?? ""));
  return fill;
}

/** List the best fills, with the probabilities that both ways of reading give them. */
async function fillMore(target, parts, template, options, signal) {
  const {
    results: [fills],
  } = await post("v1/fill", { template, n: MOST, ...options }, signal);
  const entries = fills.map((fill) => ({
    fill,
    [target.kind]: fill.log_prob,
    text: parts.map((part) => part.text ?? "").join("").length < LONG && scored(parts, fill.fills),
  }));
  const render = () =>
    show(
      target.rows,
      entries.map((entry, i) => row(entry, i, target.kind, parts)),
    );
  render();
  const other = target.kind === "future" ? "past" : "future",
    known = entries.filter((entry) => entry.text);
  if (!columns[other] || !known.length) return;
  const query = known.map((entry) => entry.text);
  const { results } = await post("v1/log_prob", { query, future: other === "future" }, signal);
  results.forEach((score, i) => (known[i][other] = score.log_prob));
  render();
}

/** The template that asks for the probability of a fill; null if a gap is empty. */
function scored(parts, fills) {
  const rest = [...fills];
  const asked = parts.map((part) => {
    if (part.source === undefined) return part;
    const text = rest.shift();
    return part.kind === "unknown" ? part : { ...part, source: text && `{{${escapeSlot(text)}}}` };
  });
  return asked.some((part) => part.source === "") ? null : write(asked);
}

function column(kind, parts) {
  const gaps = slots(parts).map(() => h("mark", { class: kind }));
  const rest = [...gaps],
    last = parts.findLastIndex((part) => part.source !== undefined);
  const preview = parts.map((part, i) => {
    if (part.source !== undefined) return rest.shift();
    let text = part.text;
    if (i === 0 && text.length > CONTEXT) text = `… ${text.slice(-CONTEXT)}`;
    else if (i === parts.length - 1 && text.length > CONTEXT) text = `${text.slice(0, CONTEXT)} …`;
    else if (text.length > 2 * CONTEXT) text = `${text.slice(0, CONTEXT)} … ${text.slice(-CONTEXT)}`;
    return kind === "past" && i > last ? h("del", { title: "not read" }, text) : text;
  });
  const rows = h("ol", { class: "alternatives", "aria-label": `Alternatives, ${inWords(kind)}` });
  const note = kind === "past" ? "What is crossed out is not read." : "All of the text is read.";
  const element = section(
    kind,
    null,
    h("p", { class: "hint" }, note),
    h("p", { class: "preview", "aria-live": "polite" }, preview),
    rows,
  );
  return { kind, element, gaps, rows };
}

function row(entry, index, kind, parts) {
  const { fill } = entry,
    tokens = fill.lengths.reduce((sum, length) => sum + length, 0);
  const kinds = kind === "future" ? ["future", "past"] : ["past", "future"];
  const filled = fill.fills.map((text, i) => (isGap(slots(parts)[i]) ? text : null));
  const text = fill.fills.filter((_, i) => filled[i] !== null).join(" … ") || "(nothing)";
  const button = h(
    "button",
    { type: "button", onclick: () => accept(complete(parts, filled)) },
    text,
    h("span", { class: "hidden" }, ": accept this fill"),
    kind === "future" ? h("kbd", { "data-key": "mod", "aria-hidden": "true" }, String(index + 1)) : null,
  );
  return h(
    "li",
    {},
    button,
    h("span", { class: "count" }, `${tokens} token${tokens === 1 ? "" : "s"}`),
    kinds
      .filter((name) => entry[name] !== undefined)
      .map((name) => {
        const probability = probabilityOf(entry[name]);
        return h(
          "span",
          { class: "measure" },
          bar(probability, name),
          h("span", { class: "number" }, percent(probability), h("small", {}, ` ${inWords(name)}`)),
        );
      }),
  );
}

export const ready = (parts) => slots(parts).some(isGap);
export const missing = "There is no gap to fill: select words and blank them, or type {{_}}.";

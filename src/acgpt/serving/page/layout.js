// What the model is told: copies of the given tokens, BOS and the text, and which slot reads which (as `acgpt show`).

import { post } from "./api.js";
import { literal } from "./copy.js";
import { $, h, show, svg } from "./dom.js";
import { hint, inWords, KINDS, kindsShown, legend, visible } from "./parts.js";
import { escapeSlot, mapSlots, shorten, slots, write } from "./template.js";

const SIDE = 17; // pixels of a slot
const GAP = 6; // pixels between the copies and the text
const NUMBER = 28; // pixels of a position
const LETTER = 7.3; // pixels
const GUESS = 3; // tokens of a gap that has not been filled
const CONTEXT = 120; // characters of given text beside a slot: the mask is quadratic
const ROLES = ["copy", "BOS", "given", "asked", "unknown"];

const EXPLANATION =
  "A row is a slot of the model's input: it reads the coloured columns, and → is what is predicted there. " +
  "Copies of the given tokens keep their positions, so the text can read its own future.";

export const label = "Draw";
export const ready = (parts) => slots(parts).length > 0;
export const alone = ready;
export const missing = "Nothing is asked yet: select words and put {{ and }} around them, or make them a gap.";

/** What is drawn with the future: the query that the template stands for. */
export function question({ parts }) {
  const template = drawable(parts);
  const code = [`query = lm.query(${literal(template)})`, "print(query)"];
  return { path: "v1/layout", body: { template, future: true }, template: write(parts), code };
}

/** The template of a text as it can be drawn; what had to be changed for this is added to the notes. */
function drawable(parts, notes = new Set()) {
  const near = shorten(parts, CONTEXT);
  if (write(near) !== write(parts)) notes.add("Text far from the slots is left out.");
  const changed = mapSlots(near, (slot) => {
    if (slot.kind === "gap") {
      const tokens = Math.max(slot.least, Math.min(GUESS, Number(slot.most ?? GUESS))) || 1;
      notes.add(`A gap is drawn as a blank of ${tokens} token${tokens > 1 ? "s" : ""}.`);
      return { ...slot, source: `{{_${tokens}}}` };
    }
    if (slot.kind !== "alternatives") return slot;
    notes.add("Of alternatives, the first is drawn.");
    return { ...slot, source: `{{${escapeSlot(slot.alternatives.find(Boolean))}}}` };
  });
  return write(changed);
}

export async function run({ parts, compare, signal }) {
  const notes = new Set();
  const template = drawable(parts, notes);
  const ask = (kind) => post("v1/layout", { template, future: kind === "future" }, signal);
  const kinds = kindsShown(compare);
  const layouts = await Promise.all(kinds.map(ask));
  const roles = ROLES.filter((role) => role !== "unknown" || layouts.some((layout) => layout.roles.includes(role)));
  show(
    $("layout"),
    hint(EXPLANATION),
    legend(roles.map((role) => [`role-${role}`, role])),
    [...notes].map(hint),
    h(
      "div.drawings",
      kinds.map((kind, i) => figure(kind, layouts[i])),
    ),
  );
}

function figure(kind, layout) {
  const order = kind === "future" ? `${layout.copies} copies, then BOS and the text` : "BOS and the text";
  const attributes = { tabindex: 0, role: "group", "aria-label": `Layout, ${inWords(kind)}` };
  return h("figure.drawing", attributes, h("figcaption", `${KINDS[kind]}: ${order}`), draw(layout), described(layout));
}

function draw({ copies, tokens, ids, positions, roles, predicts, mask }) {
  const names = tokens.map((token, i) => (roles[i] === "BOS" ? "BOS" : short(visible(token, ids[i]))));
  const targets = predicts.map((target) => (target ? `→ ${short(visible(target.text, target.id))}` : ""));
  const widest = (texts) => LETTER * Math.max(...texts.map((text) => [...text].length));
  const at = (slot) => slot * SIDE + (copies && slot >= copies ? GAP : 0);
  const label = widest(names) + 6;
  const [left, top, end] = [label + NUMBER, label + 26, at(names.length)];
  const [width, height] = [left + end + 14 + widest(targets), top + end + 4];

  const text = (x, y, name, words, more) => svg(`text.${name}`, { x, y, ...more }, words);
  const square = (x, y, name, inset = 0) => {
    const side = SIDE - 2 - 2 * inset;
    return svg(`rect.${name}`, { x: x + inset, y: y + inset, width: side, height: side, rx: 2 });
  };
  const rows = names.map((name, q) => {
    const [x, y, role, position] = [left + at(q), top + at(q), `role-${roles[q]}`, String(positions[q])];
    return [
      text(label - 2, y + 12, role, name, { "text-anchor": "end" }),
      text(left - 5, y + 12, "position", position, { "text-anchor": "end" }),
      svg(`text.${role}`, { transform: `translate(${x + 12}, ${top - 20}) rotate(-90)` }, name),
      text(x + SIDE / 2 - 1, top - 6, "position", position, { "text-anchor": "middle" }),
      [...mask[q]].map((read, k) => square(left + at(k), y, read === "1" ? `reads.role-${roles[k]}` : "unread")),
      targets[q] && [square(x, y, "predicts", 0.5), text(left + end + 8, y + 12, "role-asked", targets[q])],
    ];
  });
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" }, rows);
}

/** The drawing in words, for screen readers. */
function described({ copies, tokens, ids, positions, roles, predicts }) {
  const rows = tokens.map((token, i) => {
    const name = roles[i] === "BOS" ? "BOS" : visible(token, ids[i]);
    const reads = [copies && "all copies", i >= copies && "the text up to itself"].filter(Boolean).join(", and ");
    const target = predicts[i] ? `, predicts ${visible(predicts[i].text, predicts[i].id)}` : "";
    return h("li", `${name}, ${roles[i]}, position ${positions[i]}, reads ${reads}${target}`);
  });
  return h("ol.hidden", rows);
}

const short = (text) => ([...text].length > 14 ? [...text].slice(0, 13).join("") + "…" : text);

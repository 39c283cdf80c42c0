// What the model is told: copies of the given tokens, BOS and the text, and which slot reads which (as `acgpt show`).

import { post } from "./api.js";
import { literal } from "./copy.js";
import { $, h, show, svg, visible } from "./dom.js";
import { inWords, KINDS, kindsShown } from "./kinds.js";
import { escapeSlot, slots, write } from "./template.js";

const SIDE = 17,
  NUMBER = 28,
  LETTER = 7.3; // pixels
const GUESS = 3; // tokens of a gap that has not been filled
const CONTEXT = 120; // characters of given text beside a slot
const ROLES = ["copy", "BOS", "given", "asked", "unknown"];

const EXPLANATION =
  "A row is a slot of the model's input: it reads the coloured columns, and → is what is predicted there. " +
  "Copies of the given tokens keep their positions, so the text can read its own future.";

export const label = "Draw";
export const ready = (parts) => slots(parts).length > 0;
export const alone = ready;
export const missing = "Nothing is asked yet: select words and blank them, or put {{ and }} around them.";

/** What is drawn with the future: the query that the template stands for. */
export function question({ parts }) {
  const template = drawable(parts);
  const code = [`query = lm.query(${literal(template)})`, "print(query)"];
  return { path: "v1/layout", body: { template, future: true }, template: write(parts), code };
}

/** The template of a text as it can be drawn; what had to be changed for this is added to the notes. */
function drawable(parts, notes = []) {
  const changed = shorten(parts, notes).map((part) => {
    if (part.kind === "gap") {
      const tokens = Math.max(part.least, Math.min(GUESS, Number(part.most ?? GUESS))) || 1;
      notes.push(`A gap is drawn as a blank of ${tokens} token${tokens > 1 ? "s" : ""}.`);
      return { ...part, source: `{{_${tokens}}}` };
    }
    if (part.kind !== "alternatives") return part;
    notes.push("Of alternatives, the first is drawn.");
    return { ...part, source: `{{${escapeSlot(part.alternatives.find(Boolean))}}}` };
  });
  return write(changed);
}

export async function run({ parts, compare, signal }) {
  const notes = [];
  const kinds = kindsShown(compare);
  const template = drawable(parts, notes);
  const layouts = await Promise.all(
    kinds.map((kind) => post("v1/layout", { template, future: kind === "future" }, signal)),
  );
  show(
    $("layout"),
    h("p", { class: "hint" }, EXPLANATION),
    h(
      "ul",
      { class: "legend", "aria-label": "Colours" },
      ROLES.filter((role) => role !== "unknown" || layouts.some(({ roles }) => roles.includes(role))).map((role) =>
        h("li", {}, h("span", { class: `swatch role-${role}`, "aria-hidden": "true" }), role),
      ),
    ),
    [...new Set(notes)].map((note) => h("p", { class: "hint" }, note)),
    h(
      "div",
      { class: "drawings" },
      layouts.map((layout, i) =>
        h(
          "figure",
          {
            class: "drawing",
            tabindex: "0",
            role: "group",
            "aria-label": `Layout, ${inWords(kinds[i])}`,
          },
          h(
            "figcaption",
            {},
            `${KINDS[kinds[i]]}: `,
            kinds[i] === "future" ? `${layout.copies} copies, then BOS and the text` : "BOS and the text",
          ),
          draw(layout),
          described(layout),
        ),
      ),
    ),
  );
}

/** Cut given text that is far from any slot: the mask is quadratic. */
function shorten(parts, notes) {
  return parts.map((part, i) => {
    if (part.source !== undefined || part.text.length <= 2 * CONTEXT) return part;
    notes.push("Text far from the slots is left out.");
    const head = i > 0 ? part.text.slice(0, CONTEXT) : "",
      tail = i < parts.length - 1 ? part.text.slice(-CONTEXT) : "";
    return { ...part, text: head && tail ? `${head} … ${tail}` : head + tail };
  });
}

function draw({ copies, tokens, ids, positions, roles, predicts, mask }) {
  const gap = copies ? 6 : 0,
    count = tokens.length;
  const names = tokens.map((token, i) => (roles[i] === "BOS" ? "BOS" : short(visible(token, ids[i]))));
  const at = (slot) => slot * SIDE + (slot >= copies ? gap : 0);
  const label = LETTER * Math.max(...names.map((name) => [...name].length)) + 6;
  const left = label + NUMBER,
    top = label + 26;
  const widest = Math.max(
    0,
    ...predicts.map((target) => (target ? [...visible(target.text, target.id)].length + 2 : 0)),
  );
  const width = left + at(count) + 14 + LETTER * Math.min(16, widest),
    height = top + at(count) + 4;
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" });
  for (let q = 0; q < count; q++) {
    const y = top + at(q);
    drawing.append(
      svg("text", { x: label - 2, y: y + 12, "text-anchor": "end", class: `role-${roles[q]}` }, names[q]),
      svg("text", { x: left - 5, y: y + 12, "text-anchor": "end", class: "position" }, String(positions[q])),
      svg(
        "text",
        { transform: `translate(${left + at(q) + 12}, ${top - 20}) rotate(-90)`, class: `role-${roles[q]}` },
        names[q],
      ),
      svg(
        "text",
        { x: left + at(q) + SIDE / 2 - 1, y: top - 6, "text-anchor": "middle", class: "position" },
        String(positions[q]),
      ),
    );
    for (let k = 0; k < count; k++) {
      const read = mask[q][k] === "1";
      drawing.append(
        svg("rect", {
          x: left + at(k),
          y,
          width: SIDE - 2,
          height: SIDE - 2,
          rx: 2,
          class: read ? `reads role-${roles[k]}` : "unread",
        }),
      );
    }
    if (predicts[q]) {
      drawing.append(
        svg("rect", { x: left + at(q) + 0.5, y: y + 0.5, width: SIDE - 3, height: SIDE - 3, rx: 2, class: "predicts" }),
        svg(
          "text",
          { x: left + at(count) + 8, y: y + 12, class: "role-asked" },
          `→ ${short(visible(predicts[q].text, predicts[q].id))}`,
        ),
      );
    }
  }
  return drawing;
}

/** The drawing in words, for screen readers. */
function described({ copies, tokens, ids, positions, roles, predicts }) {
  return h(
    "ol",
    { class: "hidden" },
    tokens.map((token, i) => {
      const reads =
        i < copies
          ? "reads all copies"
          : copies
            ? "reads all copies, and the text up to itself"
            : "reads the text up to itself";
      const target = predicts[i] ? `, predicts ${visible(predicts[i].text, predicts[i].id)}` : "";
      return h(
        "li",
        {},
        `${roles[i] === "BOS" ? "BOS" : visible(token, ids[i])}, ${roles[i]}, position ${positions[i]}, ${reads}${target}`,
      );
    }),
  );
}

const short = (text) => ([...text].length > 14 ? [...text].slice(0, 13).join("") + "…" : text);

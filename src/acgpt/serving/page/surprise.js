// A heat map: how surprising is each token, given what comes before it, and given all other tokens?
//
//   past only         one query for the whole text
//   with the future   one query per token, so they are sent in chunks, those nearest to the middle of the window first

import { describeModel, post } from "./api.js";
import { literal } from "./copy.js";
import { $, bar, h, percent, probabilityOf, show, visible } from "./dom.js";
import { column, inWords, kindsShown } from "./kinds.js";
import { escapeSlot, plain } from "./template.js";

const MOST = 400; // tokens of a text whose map with the future is computed
const CHUNK = 2000; // tokens of all queries in a request
const STEPS = [
  [1, "expected"],
  [3, "plausible"],
  [6, "surprising"],
  [Infinity, "very surprising"],
]; // below, in bits

let maps = {},
  selected = 0;

export const label = "Map";
export const ready = (parts) => Boolean(plain(parts)?.trim());
export const alone = ready;
export const missing = "The heat map needs a text without gaps: fill them first, and accept a fill.";

/** The request for a map of the text, or of the selected part of it. */
async function mapped(parts, selection, signal) {
  const part = selection.trim().length > 1 && parts.every(({ source }) => source === undefined);
  const { method } = await describeModel(signal);
  const top = ["ac-gpt", "gpt"].includes(method) ? 5 : 0; // other methods have no most probable tokens
  return { text: part ? selection : plain(parts), top };
}

/** What the map with the future shows; in Python, what both of them show. */
export async function question({ parts, selection }) {
  const body = { ...(await mapped(parts, selection)), future: true },
    template = `{{${escapeSlot(body.text)}}}`;
  const code = [
    `query = lm.query(${literal(template)})`,
    "places = range(len(query))",
    "others = [acgpt.Query(query.tokens, [other != place for other in places]) for place in places]",
    "for past, future in zip(lm.log_prob(query).tokens, lm.log_prob(others, future=True)):",
    "    print(past.log_prob, future.log_prob, repr(past.text))",
  ];
  return { path: "v1/surprise", body, template, code };
}

export async function run({ parts, selection, compare, signal, progress }) {
  const body = await mapped(parts, selection, signal);
  maps = {};
  const { pieces, tokens } = await post("v1/surprise", body, signal);
  const kinds = kindsShown(compare);
  const note = h("p", { class: "hint", role: "status" });
  for (const kind of kinds) maps[kind] = makeMap(kind, pieces);
  show(
    $("surprise"),
    legend(),
    h(
      "div",
      { class: "columns" },
      kinds.map((kind) => maps[kind].element),
    ),
    note,
    h("div", { class: "expected", id: "expected" }),
  );
  if (maps.past) colour(maps.past, tokens);
  select(0);

  if (pieces.length > MOST) {
    note.textContent =
      `With the future each token is a query of its own, so only texts of up to ${MOST} tokens are mapped; ` +
      `this one has ${pieces.length}. Select a part of it.`;
    return;
  }
  const waiting = new Set(pieces.keys()),
    size = Math.max(1, Math.min(64, Math.floor(CHUNK / (2 * pieces.length))));
  while (waiting.size) {
    progress(`${pieces.length - waiting.size} of ${pieces.length} tokens`);
    const centre = nearest(maps.future);
    const chunk = [...waiting].sort((a, b) => Math.abs(a - centre) - Math.abs(b - centre)).slice(0, size);
    const positions = chunk.map((index) => index + 1);
    const reply = await post("v1/surprise", { ...body, future: true, positions }, signal);
    colour(maps.future, reply.tokens);
    chunk.forEach((index) => waiting.delete(index));
    detail();
  }
  if (maps.past && selected === 0) select(largestGain());
}

/** The index of the token that the future makes more probable than any other. */
function largestGain() {
  const gain = (i) => (maps.past.tokens[i]?.bits ?? 0) - (maps.future.tokens[i]?.bits ?? 0);
  return [...maps.past.tokens.keys()].reduce((best, i) => (gain(i) > gain(best) ? i : best), 0);
}

function makeMap(kind, pieces) {
  const spans = pieces.map((piece, index) =>
    h(
      "span",
      {
        role: "option",
        class: "token",
        "aria-selected": "false",
        tabindex: index ? "-1" : "0",
        onpointerenter: () => select(index),
        onfocus: () => select(index),
        "aria-label": `${visible(piece, "")}: not known yet`,
      },
      piece.replace(/\n/g, "⏎\n"),
    ),
  );
  const total = h("span", { class: "number" });
  const list = h(
    "div",
    {
      role: "listbox",
      class: "heat",
      "aria-label": `Tokens, ${inWords(kind)}`,
      "aria-orientation": "horizontal",
      onkeydown: move,
    },
    spans,
  );
  return { kind, spans, tokens: [], total, element: column(kind, total, list), pieces };
}

const inBits = (bits, digits = 1) => `${Number.isFinite(bits) ? bits.toFixed(digits) : "∞"} bits`;

function colour(map, tokens) {
  for (const token of tokens) colourOne(map, token);
  showTotal(map);
}

function colourOne(map, token) {
  const index = token.position - 1,
    bits = token.log_prob === null ? Infinity : -token.log_prob / Math.LN2;
  const step = STEPS.findIndex(([below]) => bits < below),
    span = map.spans[index];
  map.tokens[index] = { ...token, bits };
  span.classList.add(`heat-${step < 0 ? 3 : step}`);
  const expected = token.expected
    .slice(0, 3)
    .map(({ text, id, log_prob }) => `${visible(text, id)} ${percent(probabilityOf(log_prob))}`);
  span.setAttribute(
    "aria-label",
    `${visible(token.text, token.id)}: ${inBits(bits)}, ${STEPS.at(step)[1]}` +
      (expected.length ? `; expected ${expected.join(", ")}` : ""),
  );
}

function showTotal(map) {
  const known = map.tokens.filter(Boolean),
    sum = known.reduce((total, each) => total + each.bits, 0);
  map.total.textContent = inBits(sum, 0) + (known.length < map.spans.length ? ` in ${known.length} tokens` : "");
}

function select(index) {
  for (const { spans } of Object.values(maps)) {
    spans[selected]?.setAttribute("aria-selected", "false");
    spans[selected]?.setAttribute("tabindex", "-1");
    spans[index]?.setAttribute("aria-selected", "true");
    spans[index]?.setAttribute("tabindex", "0");
  }
  selected = index;
  detail();
}

/** Show what was expected in place of the token that is pointed at. */
function detail() {
  const element = document.getElementById("expected");
  if (!element) return;
  show(
    element,
    Object.values(maps).map((map) => {
      const token = map.tokens[selected],
        piece = visible(map.pieces[selected] ?? "", "");
      const title = h(
        "h4",
        {},
        h("code", {}, piece),
        token ? ` ${inBits(token.bits)}, ${inWords(map.kind)}` : ` ${inWords(map.kind)}: not known yet`,
      );
      const rows = token?.expected.map(({ text, id, log_prob }) => {
        const probability = probabilityOf(log_prob);
        return h(
          "li",
          { class: id === token.id ? "same" : "" },
          h("code", {}, visible(text, id)),
          h(
            "span",
            { class: "measure" },
            bar(probability, map.kind),
            h("span", { class: "number" }, percent(probability)),
          ),
        );
      });
      return h("div", {}, title, h("ol", { "aria-label": "Expected tokens" }, rows ?? []));
    }),
  );
}

function move(event) {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const spans = [...event.currentTarget.children];
  const index = step ? selected + step : { Home: 0, End: spans.length - 1 }[event.key];
  if (!spans[index]) return;
  event.preventDefault();
  spans[index].focus();
}

/** The token nearest to the middle of the window. */
function nearest(map) {
  const middle = innerHeight / 2;
  let low = 0,
    high = map.spans.length - 1;
  while (low < high) {
    const half = (low + high) >> 1;
    if (map.spans[half].getBoundingClientRect().bottom < middle) low = half + 1;
    else high = half;
  }
  return low;
}

function legend() {
  const limits = ["under 1 bit", "1 to 3", "3 to 6", "6 and more"];
  return h(
    "ul",
    { class: "legend", "aria-label": "Colours" },
    STEPS.map(([, name], i) =>
      h("li", {}, h("span", { class: `swatch heat-${i}`, "aria-hidden": "true" }), `${name} (${limits[i]})`),
    ),
  );
}

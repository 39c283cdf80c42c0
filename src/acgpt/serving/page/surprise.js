// A heat map: how surprising is each token, given what comes before it, and given all other tokens?
//
//   past only         one query for the whole text
//   with the future   one query per token, so they are sent in chunks, those nearest to the middle of the window first

import { describeModel, post } from "./api.js";
import { literal } from "./copy.js";
import { $, h, setSelected, show } from "./dom.js";
import { column, inWords, kindsShown, legend, measure, percent, probabilityOf, visible } from "./parts.js";
import { escapeSlot, isSlot, plain } from "./template.js";

const MOST = 400; // tokens of a text whose map with the future is computed
const CHUNK = 2000; // tokens of all queries in a request
const STEPS = [
  { below: 1, name: "expected", bits: "under 1 bit" },
  { below: 3, name: "plausible", bits: "1 to 3" },
  { below: 6, name: "surprising", bits: "3 to 6" },
  { below: Infinity, name: "very surprising", bits: "6 and more" },
];

export const label = "Map";
export const ready = (parts) => Boolean(plain(parts)?.trim());
export const alone = ready;
export const missing = "The heat map needs a text without gaps: fill them first, and accept a fill.";

let maps = {}; // of the last run
let selected = 0; // the index of the token that is pointed at

/** The request for a map of the text, or of the selected part of it. */
async function mapped(parts, selection, signal) {
  const part = selection.trim().length > 1 && !parts.some(isSlot);
  const { method } = await describeModel(signal);
  const top = ["ac-gpt", "gpt"].includes(method) ? 5 : 0; // other methods have no most probable tokens
  return { text: part ? selection : plain(parts), top };
}

/** What the map with the future shows; in Python, what both of them show. */
export async function question({ parts, selection }) {
  const body = { ...(await mapped(parts, selection)), future: true };
  const template = `{{${escapeSlot(body.text)}}}`;
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
  const { pieces, tokens } = await post("v1/surprise", body, signal);
  maps = Object.fromEntries(kindsShown(compare).map((kind) => [kind, makeMap(kind, pieces)]));
  const note = h("p.hint", { role: "status" });
  const columns = Object.values(maps).map(({ element }) => element);
  const colours = STEPS.map(({ name, bits }, i) => [`heat-${i}`, `${name} (${bits})`]);
  show($("surprise"), legend(colours), h("div.columns", columns), note, h("div.expected", { id: "expected" }));
  if (maps.past) colour(maps.past, tokens);
  select(0);

  if (pieces.length > MOST) {
    note.textContent =
      `With the future each token is a query of its own, so only texts of up to ${MOST} tokens are mapped; ` +
      `this one has ${pieces.length}. Select a part of it.`;
    return;
  }
  const size = Math.max(1, Math.min(64, Math.floor(CHUNK / (2 * pieces.length))));
  let waiting = [...pieces.keys()];
  while (waiting.length) {
    progress(`${pieces.length - waiting.length} of ${pieces.length} tokens`);
    const centre = nearest(maps.future);
    waiting.sort((a, b) => Math.abs(a - centre) - Math.abs(b - centre));
    const positions = waiting.splice(0, size).map((index) => index + 1);
    const reply = await post("v1/surprise", { ...body, future: true, positions }, signal);
    colour(maps.future, reply.tokens);
    detail();
  }
  if (maps.past && selected === 0) select(largestGain());
}

/** The index of the token that the future makes more probable than any other. */
function largestGain() {
  const gains = maps.past.tokens.map(({ bits }, i) => bits - maps.future.tokens[i].bits || 0); // 0 between infinities
  return gains.indexOf(Math.max(...gains));
}

function makeMap(kind, pieces) {
  const spans = pieces.map((piece, index) => {
    const attributes = {
      role: "option",
      "aria-selected": "false",
      "aria-label": `${visible(piece, "")}: not known yet`,
      tabindex: -1,
      onpointerenter: () => select(index),
      onfocus: () => select(index),
    };
    return h("span.token", attributes, piece.replace(/\n/g, "⏎\n"));
  });
  const total = h("span.number");
  const attributes = { role: "listbox", "aria-label": `Tokens, ${inWords(kind)}`, "aria-orientation": "horizontal" };
  const list = h("div.heat", { ...attributes, onkeydown: move }, spans);
  return { kind, pieces, spans, tokens: [], total, element: column(kind, total, list) };
}

const inBits = (bits, digits = 1) => `${Number.isFinite(bits) ? bits.toFixed(digits) : "∞"} bits`;

/** Colour some tokens of a map, and add up what is known. */
function colour({ tokens, spans, total }, scored) {
  for (const token of scored) {
    const index = token.position - 1;
    const bits = token.log_prob === null ? Infinity : -token.log_prob / Math.LN2;
    const step = STEPS.findIndex(({ below }) => bits < below || below === Infinity);
    const expected = token.expected
      .slice(0, 3)
      .map(({ text, id, log_prob }) => `${visible(text, id)} ${percent(probabilityOf(log_prob))}`);
    tokens[index] = { ...token, bits };
    spans[index].classList.add(`heat-${step}`);
    const surprise = `${visible(token.text, token.id)}: ${inBits(bits)}, ${STEPS[step].name}`;
    const instead = expected.length ? `; expected ${expected.join(", ")}` : "";
    spans[index].setAttribute("aria-label", surprise + instead);
  }
  const known = tokens.filter(Boolean);
  const sum = known.reduce((sum, { bits }) => sum + bits, 0);
  total.textContent = inBits(sum, 0) + (known.length < spans.length ? ` in ${known.length} tokens` : "");
}

function select(index) {
  for (const { spans } of Object.values(maps)) {
    if (spans[selected]) setSelected(spans[selected], false);
    if (spans[index]) setSelected(spans[index], true);
  }
  selected = index;
  detail();
}

/** Show what was expected in place of the token that is pointed at. */
function detail() {
  const details = Object.values(maps).map(({ kind, pieces, tokens }) => {
    const token = tokens[selected];
    const known = token ? ` ${inBits(token.bits)}, ${inWords(kind)}` : ` ${inWords(kind)}: not known yet`;
    const rows = token?.expected.map(({ text, id, log_prob }) =>
      h(id === token.id ? "li.same" : "li", h("code", visible(text, id)), measure(probabilityOf(log_prob), kind)),
    );
    const title = h("h4", h("code", visible(pieces[selected] ?? "", "")), known);
    return h("div", title, h("ol", { "aria-label": "Expected tokens" }, rows));
  });
  show($("expected"), details);
}

function move(event) {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const spans = [...event.currentTarget.children];
  const index = step ? selected + step : { Home: 0, End: spans.length - 1 }[event.key];
  if (!spans[index]) return;
  event.preventDefault();
  spans[index].focus();
}

/** The index of the token nearest to the middle of the window. */
function nearest({ spans }) {
  const below = spans.findIndex((span) => span.getBoundingClientRect().bottom >= innerHeight / 2);
  return below < 0 ? spans.length - 1 : below;
}

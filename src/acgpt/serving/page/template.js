// Templates, as src/acgpt/query/template.py reads them: given text, and slots in {{double braces}}.

const OPENING = /(?<!\\)(\\*)\{\{(?=(?:\{\{)*(?!\{))/g; // backslashes, then braces, paired from the right
const BLANK = /_(?:([0-9]+)(?:-([0-9]+))?)?(?:\}\}|:(.*?)\}\}(?!\}))/sy;
const UNKNOWN = /\?([0-9]+)\}\}/y;
const IN_SLOT = /(\\[\\{}|_?])|(\{\{|\}\}|\|)|[^\\{}|]+|./gsu;

/**
 * Parse a template into parts with their offsets: {text, start, end}, or a slot {kind, source, start, end} of kind
 * "gap" (least, most), "blank" or "unknown" (tokens), "text" or "alternatives" (alternatives).
 * Return null if a slot is malformed: the server says what is wrong with it.
 */
export function parse(template) {
  const parts = [];
  let [given, from, offset] = ["", 0, 0];
  const addGiven = (end) => given && parts.push({ text: given, start: from, end });
  for (let match; (OPENING.lastIndex = offset), (match = OPENING.exec(template));) {
    const backslashes = match[1].length;
    const after = match.index + match[0].length;
    given += template.slice(offset, match.index) + "\\".repeat(backslashes >> 1);
    if (backslashes % 2) {
      given += "{{";
      offset = after;
      continue;
    }
    const start = after - 2;
    const slot = parseSlot(template, after);
    if (!slot) return null;
    addGiven(start);
    parts.push({ ...slot, start, source: template.slice(start, slot.end) });
    given = "";
    offset = from = slot.end;
  }
  given += template.slice(offset);
  addGiven(template.length);
  return parts;
}

function parseSlot(template, inside) {
  if (template[inside] === "_" || template[inside] === "?") {
    const pattern = template[inside] === "_" ? BLANK : UNKNOWN;
    pattern.lastIndex = inside;
    const match = pattern.exec(template);
    if (!match) return null;
    const end = inside + match[0].length;
    const [, first, last, regex] = match;
    if (pattern === UNKNOWN) return { kind: "unknown", tokens: Number(first), end };
    if (first !== undefined && last === undefined && regex === undefined)
      return { kind: "blank", tokens: Number(first), end };
    return { kind: "gap", least: Number(first ?? 0), most: last ?? first, end };
  }
  const alternatives = [""];
  IN_SLOT.lastIndex = inside;
  for (let match; (match = IN_SLOT.exec(template));) {
    const [all, escaped, mark] = match;
    if (mark === "{{") return null;
    if (mark === "}}") {
      if (!alternatives.some(Boolean)) return null;
      const kind = alternatives.length > 1 ? "alternatives" : "text";
      return { kind, alternatives, end: IN_SLOT.lastIndex };
    }
    if (mark === "|") alternatives.push("");
    else alternatives[alternatives.length - 1] += escaped ? escaped[1] : all;
  }
  return null;
}

/** Escape given text. Backslashes at its end are doubled if a slot follows. */
export function escape(text, beforeSlot = false) {
  const escaped = text.replace(/(?<!\\)(\\*)(\{{2,})/g, (_, backslashes, braces) => {
    const lead = braces.length % 2 ? backslashes + "{" : backslashes.repeat(2);
    return lead + "\\{{".repeat(braces.length >> 1);
  });
  return beforeSlot ? escaped + /\\*$/.exec(text)[0] : escaped;
}

/** Escape text inside a slot. */
export const escapeSlot = (text) => text.replace(/[\\{}|_?]/g, "\\$&");

/** Put a template together again, with some of its parts changed: given text is `text`, a slot its `source`. */
export function write(parts) {
  return parts.map((part, i) => part.source ?? escape(part.text, Boolean(parts[i + 1]?.source))).join("");
}

export const isSlot = (part) => part.source !== undefined;
export const slots = (parts) => parts.filter(isSlot);

/** The parts with something else in place of the slots: a function gets each slot and its number. */
export function mapSlots(parts, change) {
  let number = 0;
  return parts.map((part) => (isSlot(part) ? change(part, number++) : part));
}

/** Put texts in place of the slots; a slot whose text is null stays. */
export function complete(parts, texts) {
  const joined = []; // given text in one piece: how it is escaped depends on what is around it
  for (const part of mapSlots(parts, (slot, i) => (texts[i] === null ? slot : { text: texts[i] }))) {
    if (joined.length && !isSlot(part) && !isSlot(joined.at(-1))) joined.at(-1).text += part.text;
    else joined.push({ ...part });
  }
  return write(joined);
}

/** The parts up to the last slot: what a model knows that reads the past only. */
export const past = (parts) => parts.slice(0, parts.findLastIndex(isSlot) + 1);

/** The parts with so many characters of given text on each side of a slot. */
export function shorten(parts, most) {
  return parts.map((part, i) => {
    const head = i > 0 ? most : 0;
    const tail = i < parts.length - 1 ? most : 0;
    if (isSlot(part) || part.text.length <= head + tail) return part;
    const near = [part.text.slice(0, head), "…", part.text.slice(part.text.length - tail)];
    return { ...part, text: near.filter(Boolean).join(" ") };
  });
}

/** The text, if nothing has to be filled or chosen; else null. */
export function plain(parts) {
  if (slots(parts).some((slot) => slot.kind !== "text")) return null;
  return parts.map((part) => part.text ?? part.alternatives[0]).join("");
}

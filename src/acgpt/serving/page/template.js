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
  let given = "",
    from = 0,
    offset = 0;
  const addGiven = (end) => given && parts.push({ text: given, start: from, end });
  for (let match; (OPENING.lastIndex = offset), (match = OPENING.exec(template));) {
    const backslashes = match[1].length,
      after = match.index + match[0].length;
    given += template.slice(offset, match.index) + "\\".repeat(backslashes >> 1);
    if (backslashes % 2) {
      given += "{{";
      offset = after;
      continue;
    }
    const start = after - 2,
      slot = parseSlot(template, after);
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
    const end = inside + match[0].length,
      [, first, last, regex] = match;
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

/** Put texts in place of the slots; a slot whose text is null stays. */
export function complete(parts, texts) {
  const rest = [...texts],
    joined = []; // given text in one piece: how it is escaped depends on what is around it
  for (const part of parts) {
    const text = part.source === undefined ? part.text : rest.shift();
    if (text === null) joined.push(part);
    else if (joined.length && joined.at(-1).source === undefined) joined.at(-1).text += text;
    else joined.push({ text });
  }
  return write(joined);
}

export const slots = (parts) => parts.filter((part) => part.source !== undefined);
export const has = (parts, kind) => slots(parts).some((slot) => slot.kind === kind);

/** The parts up to the last slot: what a model knows that reads the past only. */
export function past(parts) {
  const last = parts.findLastIndex((part) => part.source !== undefined);
  return parts.slice(0, last + 1);
}

/** The text, if nothing has to be filled or chosen; else null. */
export function plain(parts) {
  if (slots(parts).some((slot) => slot.kind !== "text")) return null;
  return parts.map((part) => part.text ?? part.alternatives[0]).join("");
}

// The text field: slots are marked behind it, selections become gaps, and every change can be undone.

import { $, h, show } from "./dom.js";
import { History } from "./history.js";
import { parse, slots } from "./template.js";

const field = $("text"),
  backdrop = $("backdrop");
let history = new History(""),
  changed = () => {};

export const text = () => field.value;
export const selection = () => field.value.slice(field.selectionStart, field.selectionEnd);
export const focus = () => field.focus();

/** Begin with a text, and call a function whenever it changes. */
export function start(initial, onchange) {
  field.value = initial;
  history = new History(initial);
  changed = onchange;
  field.addEventListener("input", () => {
    history.add(field.value, true);
    update();
  });
  update();
}

/** Replace the text, as a step that can be undone; the caret goes to `caret`. */
export function set(value, caret = value.length) {
  history.add(value);
  write(value, caret);
}

/** Replace the text, and go on there. */
export function accept(value) {
  set(value);
  focus();
}

/** The text around the selection, or the word at the caret; white space around the words is outside. */
export function around() {
  let from = field.selectionStart,
    to = field.selectionEnd;
  const value = field.value;
  if (from === to) {
    while (from > 0 && /[\p{L}\p{N}]/u.test(value[from - 1])) from--;
    while (to < value.length && /[\p{L}\p{N}]/u.test(value[to])) to++;
  }
  while (from < to && /\s/.test(value[from])) from++;
  while (to > from && /\s/.test(value[to - 1])) to--;
  const before = value.slice(0, from) + /\\*$/.exec(value.slice(0, from))[0]; // a backslash would escape the braces
  return { before, after: value.slice(to) };
}

/** Replace these words by a slot. */
export function replaceSelection(slot) {
  const { before, after } = around();
  set(before + slot + after, before.length + slot.length);
}

export const blank = () => replaceSelection("{{_}}");
export const undo = () => restore(history.undo());
export const redo = () => restore(history.redo());

function restore(value) {
  if (value !== null) write(value, Math.min(field.selectionEnd, value.length));
}

function write(value, caret) {
  field.value = value;
  field.setSelectionRange(caret, caret);
  update();
}

function update() {
  $("undo").disabled = !history.past.length;
  $("redo").disabled = !history.future.length;
  const value = field.value,
    marked = [];
  let offset = 0;
  for (const slot of slots(parse(value) ?? [])) {
    marked.push(value.slice(offset, slot.start), h("mark", slot.source));
    offset = slot.end;
  }
  show(backdrop, marked, value.slice(offset) + "\n");
  changed(value);
}

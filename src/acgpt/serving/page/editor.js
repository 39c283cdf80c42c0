// The text field: slots are marked behind it, selections become gaps, and every change can be undone.

import { $, h, show } from "./dom.js";
import { History } from "./history.js";
import { parse, slots } from "./template.js";

const field = $("text");
let history = new History("");
let changed = () => {};

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
  if (value === field.value) return;
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
  const value = field.value;
  let { selectionStart: from, selectionEnd: to } = field;
  if (from === to) {
    from = value.slice(0, from).search(/[\p{L}\p{N}]*$/u);
    to += /^[\p{L}\p{N}]*/u.exec(value.slice(to))[0].length;
  }
  const words = value.slice(from, to);
  const before = value.slice(0, from + words.search(/\S|$/));
  const after = value.slice(before.length + words.trim().length);
  return { before: before + /\\*$/.exec(before)[0], after }; // a backslash would escape the braces
}

/** Replace these words by a slot. */
export function replaceSelection(slot) {
  const { before, after } = around();
  set(before + slot + after, before.length + slot.length);
}

export const makeGap = () => replaceSelection("{{_}}");
export const undo = () => move(-1);
export const redo = () => move(1);

function move(step) {
  const value = history.move(step);
  if (value !== null) write(value, Math.min(field.selectionEnd, value.length));
}

function write(value, caret) {
  field.value = value;
  field.setSelectionRange(caret, caret);
  update();
}

function update() {
  $("undo").disabled = !history.can(-1);
  $("redo").disabled = !history.can(1);
  const value = field.value;
  const marked = [];
  let offset = 0;
  for (const slot of slots(parse(value) ?? [])) {
    marked.push(value.slice(offset, slot.start), h("mark", slot.source));
    offset = slot.end;
  }
  show($("backdrop"), marked, value.slice(offset) + "\n");
  changed(value);
}

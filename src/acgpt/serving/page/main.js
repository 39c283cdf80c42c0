// The page: one text, four views of it, and what runs now.

import { Away, describeModel, post } from "./api.js";
import { curl, python, toClipboard } from "./copy.js";
import { $, h, show } from "./dom.js";
import * as editor from "./editor.js";
import { example, inView, NAMES } from "./examples.js";
import * as fill from "./fill.js";
import * as layout from "./layout.js";
import * as rank from "./rank.js";
import * as state from "./state.js";
import * as surprise from "./surprise.js";
import { parse } from "./template.js";

const VIEWS = { fill, surprise, rank, layout };
const INPUTS = { ...fill.inputs, ...rank.inputs }; // fields of the views that are part of the state
const MAC = /Mac|iPhone|iPad/.test(navigator.platform);
state.resume();
const fresh = state.read() ?? { text: null, view: null, compare: true, inputs: {} };
let view = VIEWS[fresh.view] ? fresh.view : "fill",
  compare = fresh.compare,
  job = null,
  shown = {};

// ---- what runs ------------------------------------------------------------------------------------------------------

/** Run the view, or another task, and stop what ran before. */
async function run(task = VIEWS[view].run) {
  stop();
  const own = (job = new AbortController()),
    name = view,
    text = editor.text(),
    started = Date.now();
  const parts = parse(text);
  let note = "";
  const tick = () => ($("progress").textContent = note || `${Math.round((Date.now() - started) / 1000)} s …`);
  const timer = setInterval(tick, 1000);
  $("stop").hidden = false;
  $(name).setAttribute("aria-busy", "true");
  $("progress").textContent = "…";
  hideNotice();
  try {
    if (!parts) await post("v1/query", { template: text }, own.signal); // malformed: the server says what is wrong
    if (!parts || (task === VIEWS[name].run && !VIEWS[name].ready(parts))) throw new Error(VIEWS[name].missing);
    shown[name] = text;
    $(name).classList.remove("stale");
    await task({
      parts,
      selection: editor.selection(),
      compare,
      signal: own.signal,
      progress: (words) => tick((note = words)),
    });
    if (!introduced) introduce(); // there was no key
  } catch (error) {
    if (!own.signal.aborted) fail(error, task);
  } finally {
    clearInterval(timer);
    $(name).removeAttribute("aria-busy");
    if (job === own) {
      job = null;
      $("stop").hidden = true;
      $("progress").textContent = "";
    }
  }
}

function stop() {
  job?.abort();
  job = null;
  $("stop").hidden = true;
  $("progress").textContent = "";
}

// ---- errors ---------------------------------------------------------------------------------------------------------

let waiting = 0; // which wait for the server is the latest

function fail(error, task) {
  console.warn(error);
  const [first, ...rest] = error.message.split("\n");
  const detail = rest.length ? h("pre", rest.join("\n")) : null;
  if (error instanceof Away) {
    show($("notice"), h("p", `${first} Your text is kept, and the page asks again until the server is back.`));
    awaitServer(() => run(task));
  } else {
    const again = h("button", { type: "button", onclick: () => run(task) }, "Try again");
    show($("notice"), h("p", first), detail, again);
  }
  $("notice").hidden = false;
}

function hideNotice() {
  waiting++;
  $("notice").hidden = true;
}

/** Call a function once the server answers again. */
async function awaitServer(then) {
  const own = ++waiting;
  for (let pause = 500; own === waiting; pause = Math.min(5000, 1.5 * pause)) {
    await new Promise((resolve) => setTimeout(resolve, pause));
    const reply = await fetch("health").catch(() => null);
    if (own !== waiting) return;
    if (!reply?.ok) continue;
    hideNotice();
    return then();
  }
}

let introduced = false;

/** Describe the model at the top of the page; wait for a server that is away. */
async function introduce() {
  try {
    const { model, reads_future } = await describeModel();
    const reads = reads_future ? "reads the future" : "was not trained to read the future";
    $("model").textContent = `${model}: ${reads}`;
    introduced = true;
  } catch (error) {
    $("model").textContent = error instanceof Away ? "waiting for the server …" : "no answer about the model";
    if (error instanceof Away) setTimeout(introduce, 2000);
  }
}

// ---- the controls ---------------------------------------------------------------------------------------------------

function open(name) {
  if (job && name !== view) stop();
  view = name;
  for (const other of Object.keys(VIEWS)) {
    $(other).hidden = other !== name;
    $(`tab-${other}`).setAttribute("aria-selected", String(other === name));
    $(`tab-${other}`).setAttribute("tabindex", other === name ? "0" : "-1");
  }
  $("run-label").textContent = VIEWS[name].label;
  const text = inView(editor.text(), name);
  if (text !== editor.text()) editor.set(text);
  remember();
  if (shown[name] !== text && runsAlone(text)) runText(text);
}

/** Whether the view needs no click: maps, rankings and drawings are cheap, or what the view was opened for. */
function runsAlone(text) {
  const parts = parse(text);
  return Boolean(parts && VIEWS[view].alone?.(parts));
}

function runText(text) {
  if (text !== editor.text()) editor.set(text);
  clearTimeout(redraw);
  run();
}

function current() {
  const changed = Object.entries(INPUTS).filter(([, input]) => input.value !== input.defaultValue);
  const inputs = Object.fromEntries(changed.map(([name, input]) => [name, input.value]));
  return { text: editor.text(), view, compare, inputs };
}

const remember = () => state.write(current());

function setInputs(values) {
  for (const [name, input] of Object.entries(INPUTS)) input.value = values[name] ?? input.defaultValue;
}

let redraw;

function textChanged(text) {
  if (job) stop();
  hideNotice();
  for (const name of Object.keys(VIEWS))
    $(name).classList.toggle("stale", shown[name] !== undefined && shown[name] !== text);
  remember();
  rank.follow(parse(text));
  clearTimeout(redraw);
  if (["layout", "rank"].includes(view) && runsAlone(text)) redraw = setTimeout(run, 400);
}

function setCompare(value) {
  compare = value;
  $("compare").setAttribute("aria-checked", String(compare));
}

function toggleCompare() {
  setCompare(!compare);
  remember();
  if (shown[view] === editor.text()) run();
}

/** The question of the view, to be copied. */
async function question() {
  const parts = parse(editor.text());
  if (!parts) throw new Error("A slot is not complete: run the view to see where.");
  if (!VIEWS[view].ready(parts)) throw new Error(VIEWS[view].missing);
  return VIEWS[view].question({ parts, selection: editor.selection() });
}

async function copy(make) {
  try {
    await toClipboard(await make());
    $("copied").textContent = "Copied.";
  } catch (error) {
    $("copied").textContent = error.message;
  }
  setTimeout(() => ($("copied").textContent = ""), 3000);
}

const THEMES = ["auto", "light", "dark"];

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme").textContent = `Theme: ${theme}`;
  localStorage.setItem("acgpt-theme", theme);
}

// ---- the keyboard ---------------------------------------------------------------------------------------------------

const CTRL = { Enter: () => run(), KeyB: editor.blank, KeyZ: editor.undo, KeyY: editor.redo };
const MOD = {
  KeyF: () => open("fill"),
  KeyS: () => open("surprise"),
  KeyR: () => open("rank"),
  KeyL: () => open("layout"),
  KeyP: toggleCompare,
  KeyH: () => $("help-dialog").showModal(),
};
for (let n = 1; n <= 5; n++) MOD[`Digit${n}`] = () => fill.choose(n);

/** The letter on the key, where it is a Latin one: KeyZ is elsewhere on QWERTZ and AZERTY. Else its place. */
const pressed = ({ key, code }) => (/^[a-z]$/i.test(key) ? `Key${key.toUpperCase()}` : code);

document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  const name = pressed(event);
  const ctrl = MAC ? event.metaKey : event.ctrlKey && !event.altKey;
  const mod = MAC ? event.ctrlKey : event.altKey && !event.ctrlKey; // on a Mac, Alt types characters
  let action = (ctrl && CTRL[name]) || (mod && MOD[name]);
  if (ctrl && event.shiftKey && name === "KeyZ") action = editor.redo;
  if (
    ["KeyZ", "KeyY"].includes(name) &&
    ["INPUT", "TEXTAREA"].includes(event.target.tagName) &&
    event.target.id !== "text"
  )
    return;
  if (event.key === "Escape" && job) action = stop;
  if (!action) return;
  event.preventDefault();
  action();
});

$("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the fragment is the state
  editor.focus();
});

$("tabs").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key],
    names = Object.keys(VIEWS);
  if (!step) return;
  open(names.at((names.indexOf(view) + step) % names.length));
  $(`tab-${view}`).focus();
});

// ---- start ----------------------------------------------------------------------------------------------------------

document.documentElement.classList.toggle("mac", MAC); // the names of its keys
show(
  $("examples"),
  NAMES.map((name) => h("button", { type: "button", onclick: () => runText(example(name, view)) }, name)),
);
for (const name of Object.keys(VIEWS)) $(`tab-${name}`).addEventListener("click", () => open(name));
for (const [id, action] of Object.entries({
  blank: () => (editor.blank(), editor.focus()),
  undo: editor.undo,
  redo: editor.redo,
  compare: toggleCompare,
  run: () => run(),
  stop,
  suggest: () => run(rank.suggest),
  help: () => $("help-dialog").showModal(),
  theme: () => setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % 3]),
  "copy-python": () => copy(async () => python(await question())),
  "copy-curl": () => copy(async () => curl(await question())),
  "copy-template": () => copy(() => question().then(({ template }) => template, editor.text)),
  "copy-link": () => copy(() => location.origin + state.link(current())),
}))
  $(id).addEventListener("click", action);

introduce();
setTheme(THEMES.includes(localStorage.getItem("acgpt-theme")) ? localStorage.getItem("acgpt-theme") : "auto");
setCompare(compare);
setInputs(fresh.inputs);
for (const input of Object.values(INPUTS)) input.addEventListener("input", remember);
editor.start(fresh.text ?? example(NAMES[0], view), textChanged);
addEventListener("hashchange", () => {
  const found = state.read();
  if (!found) return;
  const { text, view: name } = found;
  setCompare(found.compare);
  setInputs(found.inputs);
  if (text !== null && text !== editor.text()) editor.set(text);
  if (VIEWS[name] && name !== view) open(name);
});
open(view);

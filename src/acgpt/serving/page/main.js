// The page: one text, four views of it, and what runs now.

import { Away, describeModel, post, sleep } from "./api.js";
import { curl, python, toClipboard } from "./copy.js";
import { $, h, setSelected, show } from "./dom.js";
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
const THEMES = ["auto", "light", "dark"];

const initial = state.read() ?? { text: null, view: null, compare: true, inputs: {} };
let view = VIEWS[initial.view] ? initial.view : "fill";
let job = null; // the AbortController of what runs
const shown = {}; // the text that each view shows
const compares = () => $("compare").getAttribute("aria-checked") === "true";

// ---- what runs ------------------------------------------------------------------------------------------------------

/** Run the view, or another task, and stop what ran before. */
async function run(task = VIEWS[view].run) {
  stop();
  const own = (job = new AbortController());
  const panel = $(view);
  const { ready, missing } = VIEWS[view];
  const text = editor.text();
  const parts = parse(text);
  const started = Date.now();
  let note = "";
  const tick = () => ($("progress").textContent = note || `${Math.round((Date.now() - started) / 1000)} s …`);
  const timer = setInterval(tick, 1000);
  $("progress").textContent = "…";
  $("stop").hidden = false;
  panel.setAttribute("aria-busy", true);
  hideNotice();
  try {
    if (!parts) await post("v1/query", { template: text }, own.signal); // malformed: the server says what is wrong
    if (!parts || (task === VIEWS[view].run && !ready(parts))) throw new Error(missing);
    shown[view] = text;
    panel.classList.remove("stale");
    const progress = (words) => tick((note = words));
    await task({ parts, selection: editor.selection(), compare: compares(), signal: own.signal, progress });
    if (!introduced) introduce(); // there was no key
  } catch (error) {
    if (!own.signal.aborted) fail(error, task);
  } finally {
    clearInterval(timer);
    panel.removeAttribute("aria-busy");
    if (job === own) stop();
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
  if (error instanceof Away) {
    show($("notice"), h("p", `${first} Your text is kept, and the page asks again until the server is back.`));
    awaitServer(task);
  } else {
    const again = h("button", { type: "button", onclick: () => run(task) }, "Try again");
    show($("notice"), h("p", first), rest.length && h("pre", rest.join("\n")), again);
  }
  $("notice").hidden = false;
}

function hideNotice() {
  waiting++;
  $("notice").hidden = true;
}

/** Run a task once the server answers again, unless the notice that says so is hidden before. */
async function awaitServer(task) {
  const own = ++waiting;
  for (let pause = 500; own === waiting; pause = Math.min(5000, 1.5 * pause)) {
    await sleep(pause);
    const reply = await fetch("health").catch(() => null);
    if (own === waiting && reply?.ok) run(task);
  }
}

let introduced = false;

/** Describe the model at the top of the page; wait for a server that is away. */
async function introduce() {
  try {
    const { model, reads_future } = await describeModel();
    $("model").textContent = `${model}: ${reads_future ? "reads the future" : "was not trained to read the future"}`;
    introduced = true;
  } catch (error) {
    const away = error instanceof Away;
    $("model").textContent = away ? "waiting for the server …" : "no answer about the model";
    if (away) setTimeout(introduce, 2000);
  }
}

// ---- the state ------------------------------------------------------------------------------------------------------

function current() {
  const changed = Object.entries(INPUTS).filter(([, input]) => input.value !== input.defaultValue);
  const inputs = Object.fromEntries(changed.map(([name, input]) => [name, input.value]));
  return { text: editor.text(), view, compare: compares(), inputs };
}

const remember = () => state.write(current());

function restoreControls({ compare, inputs }) {
  $("compare").setAttribute("aria-checked", compare);
  for (const [name, input] of Object.entries(INPUTS)) input.value = inputs[name] ?? input.defaultValue;
}

// ---- the controls ---------------------------------------------------------------------------------------------------

function open(name) {
  if (name !== view) {
    stop();
    hideNotice(); // it is about the other view
  }
  view = name;
  for (const other of Object.keys(VIEWS)) {
    $(other).hidden = other !== name;
    setSelected($(`tab-${other}`), other === name);
  }
  $("run-label").textContent = VIEWS[name].label;
  const text = inView(editor.text(), name);
  editor.set(text);
  remember();
  if (shown[name] !== text && runsAlone(text)) runText(text);
}

/** Whether the view needs no click: maps, rankings and drawings are cheap, or what the view was opened for. */
function runsAlone(text) {
  const parts = parse(text);
  return Boolean(parts && VIEWS[view].alone?.(parts));
}

function runText(text) {
  editor.set(text);
  clearTimeout(redraw);
  run();
}

let redraw; // the timer of a view that follows the text

function textChanged(text) {
  stop();
  hideNotice();
  for (const name of Object.keys(VIEWS)) $(name).classList.toggle("stale", (shown[name] ?? text) !== text);
  remember();
  rank.follow(parse(text));
  clearTimeout(redraw);
  if (["layout", "rank"].includes(view) && runsAlone(text)) redraw = setTimeout(run, 400);
}

function toggleCompare() {
  $("compare").setAttribute("aria-checked", !compares());
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

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = `Theme: ${theme}`;
  localStorage.setItem("acgpt-theme", theme);
}

const BUTTONS = {
  gap: () => (editor.makeGap(), editor.focus()),
  undo: editor.undo,
  redo: editor.redo,
  compare: toggleCompare,
  run: () => run(),
  stop,
  suggest: () => run(rank.suggest),
  help: () => $("help-dialog").showModal(),
  theme: () => setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]),
  "copy-python": () => copy(async () => python(await question())),
  "copy-curl": () => copy(async () => curl(await question())),
  "copy-template": () => copy(() => question().then(({ template }) => template, editor.text)),
  "copy-link": () => copy(() => location.origin + state.link(current())),
};

// ---- the keyboard ---------------------------------------------------------------------------------------------------

const CTRL = { Enter: () => run(), KeyB: editor.makeGap, KeyZ: editor.undo, KeyY: editor.redo };
const MOD = {
  KeyF: () => open("fill"),
  KeyS: () => open("surprise"),
  KeyR: () => open("rank"),
  KeyL: () => open("layout"),
  KeyP: toggleCompare,
  KeyH: BUTTONS.help,
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
  if (event.key === "Escape" && job) action = stop;
  const ownUndo = event.target.matches("input, textarea:not(#text)") && ["KeyZ", "KeyY"].includes(name);
  if (!action || ownUndo) return;
  event.preventDefault();
  action();
});

$("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the fragment is the state
  editor.focus();
});

$("tabs").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const names = Object.keys(VIEWS);
  if (!step) return;
  open(names.at((names.indexOf(view) + step) % names.length));
  $(`tab-${view}`).focus();
});

// ---- start ----------------------------------------------------------------------------------------------------------

document.documentElement.classList.toggle("mac", MAC); // the names of its keys
for (const [id, action] of Object.entries(BUTTONS)) $(id).addEventListener("click", action);
for (const name of Object.keys(VIEWS)) $(`tab-${name}`).addEventListener("click", () => open(name));
for (const input of Object.values(INPUTS)) input.addEventListener("input", remember);
for (const name of NAMES)
  $("examples").append(h("button", { type: "button", onclick: () => runText(example(name, view)) }, name));

introduce();
setTheme(THEMES.find((theme) => theme === localStorage.getItem("acgpt-theme")) ?? "auto");
restoreControls(initial);
editor.start(initial.text ?? example(NAMES[0], view), textChanged);
open(view);
addEventListener("hashchange", () => {
  const found = state.read();
  if (!found) return;
  restoreControls(found);
  editor.set(found.text ?? editor.text());
  if (VIEWS[found.view] && found.view !== view) open(found.view);
});

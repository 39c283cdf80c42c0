// Requests to the server: JSON, streams of events, the API key, and errors in words.

import { $ } from "./dom.js";

const KEY = "acgpt-key"; // in sessionStorage: for this tab, until it is closed
const LATER = ["loading", "shutting_down"]; // codes of a server that answers later, or is followed by one that does

/** The server does not answer, or not yet: wait, and ask again. */
export class Away extends Error {}

/** The error of a reply; `fields` is what the server says of it. */
function failure(status, fields) {
  if (LATER.includes(fields?.code)) return new Away(sentence(fields.message));
  if (status >= 500 && !fields?.code) return new Away("The server does not answer."); // a proxy, or a server that stops
  return new Error(sentence(fields?.message ?? `The server has answered with status ${status}.`));
}

function sentence(message) {
  const text = message.charAt(0).toUpperCase() + message.slice(1);
  return /[.!?…]$/.test(text) || text.includes("\n") ? text : `${text}.`;
}

export const needsKey = () => sessionStorage.getItem(KEY) !== null;
export const sleep = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

/** Ask, and return the reply. */
export async function post(path, body, signal) {
  return (await send(path, { method: "POST", body: JSON.stringify(body), signal })).json();
}

let model;

/** Return what the server says about its model; it is asked until it has answered once. */
export const describeModel = async (signal) => (model ??= await (await send("v1/model", { signal })).json());

/** Ask for a stream, and yield its events as they come. */
export async function* stream(path, body, signal) {
  const reply = await send(path, { method: "POST", body: JSON.stringify({ ...body, stream: true }), signal });
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (let ended = false; !ended;) {
    const { value = "", done } = await reader.read().catch((error) => {
      throw signal?.aborted ? error : new Away("The server has stopped answering.");
    });
    const events = (text + value).split("\n\n");
    text = events.pop();
    ended = done;
    for (const event of events) {
      const data = JSON.parse(event.slice(event.indexOf("data: ") + 6));
      if (data.error) throw failure(reply.status, data.error);
      yield data;
    }
  }
}

async function send(path, options, attempt = 0) {
  const key = sessionStorage.getItem(KEY);
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  const reply = await fetch(path, { ...options, headers }).catch((error) => {
    throw options.signal?.aborted ? error : new Away("The server does not answer.");
  });
  if (reply.ok) return reply;
  const body = await reply.json().catch(() => null);
  if (reply.status === 401) {
    await askKey(key !== null);
    return send(path, options);
  }
  if (reply.status === 429 && attempt < 5) {
    await sleep(1000 * (Number(reply.headers.get("Retry-After")) || 1));
    options.signal?.throwIfAborted();
    return send(path, options, attempt + 1);
  }
  throw failure(reply.status, body?.error);
}

let asking = null; // requests that fail together ask once

const askKey = (wrong) => (asking ??= enterKey(wrong).finally(() => (asking = null)));

/** Ask for the key, and keep it. */
async function enterKey(wrong) {
  const dialog = $("key-dialog");
  $("key-reason").textContent = wrong
    ? "The server does not accept this key. Try another one."
    : "This server wants an API key. It is kept for this tab only.";
  $("key").value = dialog.returnValue = "";
  dialog.showModal();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  const key = $("key").value.trim();
  if (dialog.returnValue !== "ok" || !key) throw new Error("Without an API key the server does not answer.");
  sessionStorage.setItem(KEY, key);
}

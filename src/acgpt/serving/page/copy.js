// The current question as Python, for curl, or as a template.

import { needsKey } from "./api.js";
import { escapeSlot, parse, plain } from "./template.js";

const URL_ = location.origin + location.pathname.replace(/\/$/, "");

/** What each view asks: the method of the client, the path, and the fields of the request. */
function question(view, text) {
  const parts = parse(text),
    whole = parts && plain(parts);
  if (view === "surprise") {
    const query = whole === null ? text : `{{${escapeSlot(whole)}}}`;
    return { method: "log_prob", argument: query, path: "v1/surprise", body: { text: whole ?? text } };
  }
  if (view === "rank") return { method: "rank", argument: text, path: "v1/rank", body: { template: text } };
  if (view === "layout") return { method: "query", argument: text, path: "v1/layout", body: { template: text } };
  return { method: "fill", argument: text, path: "v1/fill", body: { template: text, n: 5 } };
}

export function python(view, text) {
  const { method, argument } = question(view, text);
  const shown = {
    fill: "for fill in answer:\n    print(fill.score, fill.text)",
    rank: "for alternative in answer:\n    print(alternative.probability, alternative.text)",
  };
  return [
    "import acgpt",
    "",
    `lm = acgpt.Client(${JSON.stringify(URL_)})  # or acgpt.load(), without a server`,
    `answer = lm.${method}(${JSON.stringify(argument)})`, // strings of JSON are strings of Python
    shown[method] ?? "print(answer)",
    "",
  ].join("\n");
}

export function curl(view, text) {
  const { path, body } = question(view, text);
  const quoted = JSON.stringify(body).replaceAll("'", "'\\''");
  const key = needsKey() ? ` -H "Authorization: Bearer $ACGPT_API_KEY"` : "";
  return `curl ${URL_}/${path} -H 'Content-Type: application/json'${key} -d '${quoted}'`;
}

/** Put a text on the clipboard, also where pages without https may not. */
export async function toClipboard(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = document.createElement("textarea");
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  if (!done) throw new Error("The browser does not allow copying.");
}

// The question of a view, as Python and for curl. A question is {path, body, template}: the request, and the template
// that asks the same; {code} is its Python, if it is not one call of the method that is named like the path.

import { needsKey } from "./api.js";

const ADDRESS = location.origin + location.pathname.replace(/\/$/, "");
const SHOWN = {
  fill: "for fill in answer:\n    print(fill.log_prob, fill.text)",
  rank: "for alternative in answer:\n    print(alternative.probability, alternative.text)",
};

export function python({ path, body, code }) {
  return [
    "import acgpt",
    "",
    `lm = acgpt.Client(${literal(ADDRESS)})  # or acgpt.load(), without a server`,
    ...(code ?? call(path.split("/").at(-1), body)),
    "",
  ].join("\n");
}

function call(method, { template, ...options }) {
  const words = Object.entries(options).map(([name, value]) => `${name}=${literal(value)}`);
  return [`answer = lm.${method}(${[literal(template), ...words].join(", ")})`, SHOWN[method]];
}

/** A value as Python writes it: its strings and numbers can be those of JSON. */
export function literal(value) {
  return typeof value === "boolean" ? (value ? "True" : "False") : JSON.stringify(value);
}

export function curl({ path, body }) {
  const quoted = JSON.stringify(body).replaceAll("'", "'\\''");
  const key = needsKey() ? ` -H "Authorization: Bearer $ACGPT_API_KEY"` : "";
  return `curl ${ADDRESS}/${path} -H 'Content-Type: application/json'${key} -d '${quoted}'`;
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

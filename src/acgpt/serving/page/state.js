// The state of the page in the fragment of its address, which browsers do not send to servers.

/** Read the state: {text, view, compare}; null if the fragment is empty or not one of ours, such as #text. */
export function read() {
  if (!/[#&](text|view)=/.test(location.hash)) return null;
  const fields = new URLSearchParams(location.hash.slice(1));
  return { text: fields.get("text"), view: fields.get("view"), compare: fields.get("compare") !== "0" };
}

let timer;

/** Write the state, soon: browsers limit how often an address may change. */
export function write(state) {
  clearTimeout(timer);
  timer = setTimeout(() => history.replaceState(null, "", link(state)), 200);
}

export function link({ text, view, compare }) {
  const fields = new URLSearchParams({ text, view, ...(compare ? {} : { compare: "0" }) });
  return `${location.pathname}${location.search}#${fields}`;
}

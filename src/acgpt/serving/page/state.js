// The state of the page in the fragment of its address, which browsers do not send to servers.

const UNWRITTEN = "acgpt-unwritten"; // in sessionStorage: the state of a page that was left before it was written

// Go on with the state that was not written when this address was left.
const left = JSON.parse(sessionStorage.getItem(UNWRITTEN) ?? "{}");
sessionStorage.removeItem(UNWRITTEN);
if (left.at === location.href) history.replaceState(null, "", left.link);

/**
 * Read the state: {text, view, compare, inputs}, where `inputs` has the values of fields by their names; null if the
 * fragment is empty or not one of ours, such as #text.
 */
export function read() {
  if (!/[#&](text|view)=/.test(location.hash)) return null;
  const { text = null, view, compare, ...inputs } = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  return { text, view, compare: compare !== "0", inputs };
}

let timer;
let pending = null; // the address that is written soon

/** Write the state, soon: browsers limit how often an address may change. */
export function write(state) {
  clearTimeout(timer);
  pending = link(state);
  timer = setTimeout(() => {
    history.replaceState(null, "", pending);
    pending = null;
    sessionStorage.removeItem(UNWRITTEN);
  }, 200);
}

// A reload uses the address from before this event.
addEventListener("pagehide", () => {
  if (pending) sessionStorage.setItem(UNWRITTEN, JSON.stringify({ at: location.href, link: pending }));
});

export function link({ text, view, compare, inputs }) {
  const fields = new URLSearchParams({ text, view, ...(compare ? {} : { compare: "0" }), ...inputs });
  return `${location.pathname}${location.search}#${fields}`;
}

// Elements without HTML strings: every text becomes a text node, so that no text is ever read as HTML.

export const $ = (id) => document.getElementById(id);

/** Make an element: h("button.small", { type: "button", onclick: accept }, "Accept"). Attributes can be left out. */
export const h = (tag, ...rest) => make((name) => document.createElement(name), tag, rest);

/** Make an element of SVG. */
export const svg = (tag, ...rest) =>
  make((name) => document.createElementNS("http://www.w3.org/2000/svg", name), tag, rest);

function make(create, tag, rest) {
  const [name, ...classes] = tag.split(".");
  const element = create(name);
  element.classList.add(...classes);
  const attributes = rest[0]?.constructor === Object ? rest.shift() : {};
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  show(element, rest);
  return element;
}

/** Replace what is in an element; null and empty texts are left out. */
export function show(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter(Boolean));
}

/** Select a tab or an option, or deselect it; the Tab key stops only at the selected one. */
export function setSelected(element, selected) {
  element.setAttribute("aria-selected", selected); // Firefox before 119 has no ariaSelected
  element.tabIndex = selected ? 0 : -1;
}

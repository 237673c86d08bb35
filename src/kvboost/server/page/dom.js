// Small helpers for elements. Text always goes in as text, never as HTML.

export const byId = (id) => document.getElementById(id);

/** An element with properties (`data-*`, `aria-*` and `role` as attributes) and children: nodes or strings. */
export function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children);
  return node;
}

/** An SVG element; every property is an attribute. */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Say `text` to screen readers. */
export function announce(text) {
  byId("announcer").textContent = text;
}

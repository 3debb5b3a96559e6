// Elements without HTML text: whatever comes from a client is text and stays text.

export const $ = (id) => document.getElementById(id);

/** `h("p", {class: "note"}, "text", child)`; null children are left out. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Draws again only if what is shown has changed, so that nothing is taken from under a cursor or a screen reader. */
export function show(element, value, draw) {
  const text = JSON.stringify(value);
  if (element.shown === text) return;
  element.shown = text;
  element.replaceChildren(...[draw(value)].flat());
}

/** Keeps the elements of entries that stay, in the order of `entries`; `make` once, `update` each time. */
export function keyed(list, entries, key, make, update = () => {}) {
  const before = new Map([...list.children].map((child) => [child.dataset.key, child]));
  const wanted = entries.map((entry) => {
    const name = String(key(entry));
    const element = before.get(name) ?? make(entry);
    element.dataset.key = name;
    update(element, entry);
    return element;
  });
  for (const child of [...list.children]) if (!wanted.includes(child)) child.remove();
  wanted.forEach((element, at) => { if (list.children[at] !== element) list.insertBefore(element, list.children[at] ?? null); });
}

export function bar(share, kind = "") {
  const fill = h("i", {class: kind});
  fill.style.width = `${Math.max(0, Math.min(1, share || 0)) * 100}%`;
  return h("span", {class: "bar", "aria-hidden": "true"}, fill);
}

const SVG = "http://www.w3.org/2000/svg";

/** A line over time; gaps where nothing is known. Its numbers are in the text beside it. */
export function spark(points) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "spark");
  svg.setAttribute("viewBox", "0 0 100 30");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const known = points.filter((point) => point !== null);
  if (known.length < 2) return svg;
  const high = Math.max(...known) || 1;
  const x = (at) => 100 * at / (points.length - 1), y = (point) => 29 - 27 * point / high;
  let line = "", area = "", open = null;
  points.forEach((point, at) => {
    if (point === null) { if (open !== null) area += `L${x(at - 1)} 30Z`; open = null; return; }
    line += `${open === null ? "M" : "L"}${x(at).toFixed(2)} ${y(point).toFixed(2)}`;
    area += open === null ? `M${x(at)} 30L${x(at)} ${y(point)}` : `L${x(at)} ${y(point)}`;
    open = at;
  });
  if (open !== null) area += `L${x(points.length - 1)} 30Z`;
  for (const [path, kind] of [[area, "area"], [line, ""]]) {
    const element = document.createElementNS(SVG, "path");
    element.setAttribute("d", path);
    if (kind) element.setAttribute("class", kind);
    svg.append(element);
  }
  return svg;
}

// Small helpers around the document. Elements are built, never parsed from text: nothing a model writes becomes markup.

export const byId = (id) => document.getElementById(id);

/** An element with properties, attributes (by their names with a dash or `aria`), listeners (`on...`) and children. */
export function make(tag, given = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (value === undefined || value === null) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name.includes("-") || name === "role" || name === "for") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

/** A symbol of the page's sprite; decoration, so that its button needs a text or a label. */
export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "icon");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

let toastTimer = 0;

/** Says something for three seconds. */
export function toast(text) {
  const place = byId("toast");
  place.textContent = text;
  place.hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => { place.hidden = true; }, 3000);
}

/** Copies text; says so. */
export async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = make("textarea", { value: text, class: "offscreen" });
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  toast(`${what} copied`);
}

/** Shows or hides the line under the header. */
export function notice(text) {
  const place = byId("notice");
  place.textContent = text ?? "";
  place.hidden = !text;
}

// Markdown to elements: what chat models write. Blocks first, then spans; links lead to http(s) only.

import { copy, make } from "/ui/dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const ROW = /^\s*\|.*\|\s*$/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const MAX_DEPTH = 6;

/** The elements of a text. */
export function markdown(text) {
  return blocks(text.split("\n"), 0);
}

function blocks(lines, depth) {
  const found = [];
  let i = 0;
  while (i < lines.length) {
    const line = lines[i];
    const fence = FENCE.exec(line);
    if (fence) {
      const end = closing(lines, i + 1, fence[1]);
      found.push(codeBlock(lines.slice(i + 1, end).join("\n"), fence[2]));
      i = end + 1;
    } else if (HEADING.test(line)) {
      const [, marks, title] = HEADING.exec(line);
      found.push(make(`h${Math.min(6, marks.length + 2)}`, {}, ...spans(title)));
      i += 1;
    } else if (RULE.test(line)) {
      found.push(make("hr"));
      i += 1;
    } else if (/^ {0,3}>/.test(line) && depth < MAX_DEPTH) {
      const end = until(lines, i, (l) => /^ {0,3}>/.test(l));
      const inner = lines.slice(i, end).map((l) => l.replace(/^ {0,3}> ?/, ""));
      found.push(make("blockquote", {}, ...blocks(inner, depth + 1)));
      i = end;
    } else if (ITEM.test(line) && depth < MAX_DEPTH) {
      const end = listEnd(lines, i);
      found.push(list(lines.slice(i, end), depth));
      i = end;
    } else if (ROW.test(line) && DIVIDER.test(lines[i + 1] ?? "")) {
      const end = until(lines, i + 2, (l) => ROW.test(l));
      found.push(table(lines.slice(i, end)));
      i = end;
    } else if (!line.trim()) {
      i += 1;
    } else {
      const end = until(lines, i, (l, at) => l.trim() && (at === i || !startsBlock(l)));
      found.push(make("p", {}, ...withBreaks(lines.slice(i, end))));
      i = end;
    }
  }
  return found;
}

const startsBlock = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || /^ {0,3}>/.test(line) || ITEM.test(line);

function until(lines, from, holds) {
  let i = from;
  while (i < lines.length && holds(lines[i], i)) i += 1;
  return Math.max(i, from + (i === from ? 1 : 0));
}

function closing(lines, from, fence) {
  let i = from;
  while (i < lines.length && !(lines[i].trim().startsWith(fence) && lines[i].trim().replaceAll(fence[0], "") === "")) i += 1;
  return i;
}

function listEnd(lines, from) {
  let i = from + 1;
  while (i < lines.length) {
    const line = lines[i];
    const indented = /^\s{2,}\S/.test(line);
    if (ITEM.test(line) || indented) i += 1;
    else if (!line.trim() && (ITEM.test(lines[i + 1] ?? "") || /^\s{2,}\S/.test(lines[i + 1] ?? ""))) i += 1;
    else break;
  }
  return i;
}

function list(lines, depth) {
  const [, base, mark] = ITEM.exec(lines[0]);
  const ordered = /\d/.test(mark);
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= base.length) items.push([item[3]]);
    else items.at(-1).push(line.replace(new RegExp(`^\\s{0,${base.length + 4}}`), ""));
  }
  const start = ordered ? Number.parseInt(mark, 10) : undefined;
  return make(ordered ? "ol" : "ul", { start }, ...items.map((inner) => make("li", {}, ...tight(inner, depth))));
}

function tight(lines, depth) {
  const made = blocks(lines, depth + 1);
  return made.length && made[0].tagName === "P" ? [...made[0].childNodes, ...made.slice(1)] : made;
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const head = make("tr", {}, ...cells(lines[0]).map((cell) => make("th", {}, ...spans(cell))));
  const rows = lines.slice(2).map((line) => make("tr", {}, ...cells(line).map((cell) => make("td", {}, ...spans(cell)))));
  return make("div", { class: "scroll" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
}

function codeBlock(text, language) {
  const bar = make("div", { class: "code-bar" }, make("span", {}, language || "text"),
    make("button", { type: "button", onclick: () => copy(text, "Code") }, "Copy"));
  return make("div", { class: "code-block" }, bar, make("pre", { tabIndex: 0 }, make("code", {}, text)));
}

function withBreaks(lines) {
  return lines.flatMap((line, i) => (i ? [make("br"), ...spans(line)] : spans(line)));
}

const SPAN = /(`+)(.+?)\1|\*\*(.+?)\*\*|__(.+?)__|(?<![\w*])\*([^\s*](?:.*?[^\s*])?)\*(?!\w)|(?<!\w)_([^\s_](?:.*?[^\s_])?)_(?!\w)|~~(.+?)~~|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)|(https?:\/\/[^\s<>()]+[^\s<>().,;:!?'"])/;

function spans(text) {
  const found = [];
  let rest = text;
  while (rest) {
    const match = SPAN.exec(rest);
    if (!match) break;
    if (match.index) found.push(rest.slice(0, match.index));
    found.push(span(match));
    rest = rest.slice(match.index + match[0].length);
  }
  if (rest) found.push(rest);
  return found;
}

function span(match) {
  const [whole, ticks, code, bold, bold2, italic, italic2, struck, label, target, bare] = match;
  if (ticks) return make("code", {}, code.trim() || code);
  if (bold ?? bold2) return make("strong", {}, ...spans(bold ?? bold2));
  if (italic ?? italic2) return make("em", {}, ...spans(italic ?? italic2));
  if (struck) return make("del", {}, ...spans(struck));
  if (target ?? bare) return make("a", { href: target ?? bare, rel: "noopener noreferrer", target: "_blank" }, label ?? bare);
  return whole;
}

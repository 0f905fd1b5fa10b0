// Markdown to elements: what models write, and no more. Text goes into text nodes; links only where they lead to http or mail.

import { h } from "/page/dom.js";

/** Show `text` in `target`. Blocks that did not change stay the elements they are, so that a growing answer can be selected. */
export function render(target, text) {
  const sources = blocks(text);
  sources.forEach((source, place) => {
    const old = target.children[place];
    if (old?.source === source) return;
    const made = block(source);
    made.source = source;
    if (old) old.replaceWith(made);
    else target.append(made);
  });
  while (target.children.length > sources.length) target.lastElementChild.remove();
}

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+/;

const isNumbered = (line) => /\d/.test(ITEM.exec(line)[2]);

/** The source of each block. */
function blocks(text) {
  const found = [];
  let current = [];
  let fence = null;
  const close = () => {
    if (current.length) found.push(current.join("\n"));
    current = [];
  };
  for (const line of text.split("\n")) {
    const mark = FENCE.exec(line);
    if (fence) {
      current.push(line);
      if (mark && mark[1].startsWith(fence) && !mark[2]) {
        fence = null;
        close();
      }
    } else if (mark) {
      close();
      fence = mark[1];
      current.push(line);
    } else if (!line.trim()) {
      if (current.length && ITEM.test(current[0])) current.push(line);
      else close();
    } else if (/^#{1,6}\s/.test(line) || /^\s*([-*_])(\s*\1){2,}\s*$/.test(line)) {
      close();
      current.push(line);
      close();
    } else {
      const inList = current.length && ITEM.test(current[0]);
      const afterGap = inList && !current.at(-1).trim();
      const isOther = inList && ITEM.test(line) && !/^\s/.test(line) && isNumbered(line) !== isNumbered(current[0]);
      if (isOther || (afterGap && !ITEM.test(line) && !/^\s/.test(line)) || (!inList && current.length && ITEM.test(line))) close();
      current.push(line);
    }
  }
  close();
  return found.map((source) => source.replace(/\n+$/, ""));
}

function block(source) {
  const mark = FENCE.exec(source);
  if (mark) return code(source.split("\n").slice(1).join("\n").replace(/\n? {0,3}(`{3,}|~{3,})\s*$/, ""), mark[2]);
  const heading = /^(#{1,6})\s+(.*?)\s*#*$/.exec(source);
  if (heading) return h(`h${Math.min(6, heading[1].length + 2)}`, {}, ...inline(heading[2]));
  if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(source)) return h("hr");
  if (ITEM.test(source)) return list(source.split("\n"));
  const lines = source.split("\n");
  if (lines.every((line) => line.startsWith(">"))) {
    const quote = h("blockquote");
    render(quote, lines.map((line) => line.replace(/^> ?/, "")).join("\n"));
    return quote;
  }
  if (lines.length > 1 && lines[0].includes("|") && /^[\s|:-]*-[\s|:-]*$/.test(lines[1])) return table(lines);
  return h("p", {}, ...inline(source));
}

function list(lines) {
  const [, indent, bullet] = ITEM.exec(lines[0]);
  const numbered = /\d/.test(bullet);
  const items = [];
  for (const line of lines) {
    const mark = ITEM.exec(line);
    if (mark && mark[1].length <= indent.length + 1) items.push([line.slice(mark[0].length)]);
    else items.at(-1)?.push(line.replace(/^\s{1,4}/, ""));
  }
  const made = items.map(([first, ...rest]) => {
    const item = h("li", {}, ...inline(first));
    const more = rest.join("\n").trim();
    if (more) {
      const inner = h("div");
      render(inner, rest.join("\n"));
      item.append(...inner.children);
    }
    return item;
  });
  return h(numbered ? "ol" : "ul", numbered ? { start: parseInt(bullet, 10) } : {}, ...made);
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const row = (line, tag) => h("tr", {}, ...cells(line).map((cell) => h(tag, {}, ...inline(cell))));
  const body = h("tbody", {}, ...lines.slice(2).map((line) => row(line, "td")));
  return h("div", { class: "scrolls" }, h("table", {}, h("thead", {}, row(lines[0], "th")), body));
}

const INLINE = new RegExp(
  [
    "(`+)(?<code>[^]*?[^`])\\1(?!`)",
    "\\*\\*(?<bold>[^\\s*][^]*?)\\*\\*",
    "~~(?<gone>[^~]+)~~",
    "(?<![\\w*])[*](?<slanted>[^\\s*][^*]*)[*](?![\\w*])",
    "(?<!\\w)_(?<under>[^\\s_][^_]*)_(?!\\w)",
    "\\[(?<label>[^\\]]+)\\]\\((?<link>[^)\\s]+)\\)",
    "(?<bare>https?://[^\\s<>)\\]]+[^\\s<>)\\].,;:!?])",
    "\\\\(?<escaped>[!-/:-@[-`{-~])",
  ].join("|"),
  "g",
);

function inline(text) {
  const made = [];
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    made.push(text.slice(at, match.index));
    at = match.index + match[0].length;
    const { code: verbatim, bold, gone, slanted, under, label, link, bare, escaped } = match.groups;
    if (verbatim !== undefined) made.push(h("code", {}, verbatim.trim()));
    else if (bold !== undefined) made.push(h("strong", {}, ...inline(bold)));
    else if (gone !== undefined) made.push(h("s", {}, ...inline(gone)));
    else if (slanted ?? under) made.push(h("em", {}, ...inline(slanted ?? under)));
    else if (escaped !== undefined) made.push(escaped);
    else made.push(anchor(label ?? bare, link ?? bare, match[0]));
  }
  made.push(text.slice(at));
  return made;
}

function anchor(label, link, source) {
  if (!/^(https?:\/\/|mailto:)/i.test(link)) return source;
  return h("a", { href: link, target: "_blank", rel: "noopener noreferrer" }, label);
}

const WORDS =
  "and as async await break case catch class const continue def default del do elif else enum except export extends false False " +
  "finally fn for from func function global if impl import in interface is lambda let match mut new nil None not null or package " +
  "pass private pub public raise return self static struct super switch this throw trait true True try type use var void while with yield";
const KEYWORDS = new Set(WORDS.split(" "));
const TOKENS =
  /(?<comment>\/\/[^\n]*|\/\*[^]*?\*\/|#(?![0-9a-fA-F]{3,8}\b)[^\n]*)|(?<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`)|(?<number>\b\d[\w.]*)|(?<word>[A-Za-z_]\w*)/g;

/** A block of code, its words in a few colours, with a button that copies it. */
export function code(text, language = "") {
  const shown = h("code");
  let at = 0;
  for (const match of text.matchAll(TOKENS)) {
    const { comment, string, number, word } = match.groups;
    const kind = comment ? "comment" : string ? "string" : number ? "number" : KEYWORDS.has(word) ? "keyword" : null;
    if (!kind) continue;
    shown.append(text.slice(at, match.index), h("span", { class: kind }, match[0]));
    at = match.index + match[0].length;
  }
  shown.append(text.slice(at));
  const copy = h("button", { class: "quiet", type: "button", onclick: () => copied(copy, text) }, "Copy");
  return h("figure", { class: "code" }, h("figcaption", {}, h("span", {}, language), copy), h("pre", { tabIndex: 0 }, shown));
}

/** Put a text on the clipboard and say so on the button. */
export async function copied(button, text) {
  await navigator.clipboard.writeText(text);
  const before = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = before), 1200);
}

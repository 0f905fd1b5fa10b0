// The prefix tree: every kept piece of a prompt as a span as long as its tokens; dots are places a prompt can go on from.

import { get } from "/page/api.js";
import { bytes, count, find, h, seconds } from "/page/dom.js";

const ROW = 22;
const MAX_LEAVES = 24;
const PAUSE = 3; // seconds between two looks, and only after something happened

let isStale = true;
let lookedAt = 0;
let hits = new Map(); // by model and number
let chosen = null;

export const stale = () => (isStale = true);

export function begin() {
  setInterval(() => {
    if (!isStale || find("live").hidden || document.hidden || Date.now() / 1e3 - lookedAt < PAUSE) return;
    look();
  }, 500);
}

async function look() {
  isStale = false;
  lookedAt = Date.now() / 1e3;
  try {
    const { models } = await get("/v1/cache");
    const before = hits;
    hits = new Map(models.flatMap(({ model, nodes }) => nodes.map((node) => [`${model} ${node.number}`, node.hits])));
    draw(models, before);
  } catch {
    isStale = true; // busy or starting: later
  }
}

function draw(models, before) {
  find("tree").replaceChildren(...models.filter((one) => one.nodes.length).map((one) => picture(one, before)));
  const sums = models.map(({ num_nodes: nodes, held_bytes: held, budget_bytes: budget }) => `${count(nodes)} pieces, ${bytes(held)} of ${bytes(budget)}`);
  find("tree-sum").textContent = sums.join(" · ");
  if (!find("tree").children.length) find("tree").append(h("p", { class: "empty" }, "Nothing is kept yet. The next prompt begins the tree."));
}

/** Rows for the leaves, the latest used first; a piece is as high as all that goes on from it. */
function laidOut(nodes) {
  const places = new Map(nodes.map((node) => [node.number, { node, children: [], row: 0, rows: 0 }]));
  const roots = [];
  for (const place of places.values()) (places.get(place.node.parent)?.children ?? roots).push(place);
  let row = 0;
  const lay = (place) => {
    place.row = row;
    for (const child of place.children) if (row < MAX_LEAVES) lay(child);
    if (row === place.row) row += 1;
    place.rows = row - place.row;
  };
  for (const root of roots) if (row < MAX_LEAVES) lay(root);
  return { laid: [...places.values()].filter((place) => place.rows), rows: row };
}

function picture({ model, nodes }, before) {
  const { laid, rows } = laidOut(nodes);
  const longest = Math.max(...laid.map(({ node }) => node.length));
  const box = h("div", { class: "tree", role: "group", ariaLabel: `Kept prompts of ${model}` });
  box.style.height = `${rows * ROW}px`;
  for (const { node, row, rows: high } of laid) box.append(span(model, node, row, high, longest, before));
  const scale = h("p", { class: "axis" }, ...[0, 0.5, 1].map((part) => h("span", {}, part ? `${count(longest * part)} tokens` : "0")));
  return h("div", {}, box, scale);
}

function span(model, node, row, high, longest, before) {
  const key = `${model} ${node.number}`;
  const isLit = before.has(key) && before.get(key) < node.hits;
  const classes = ["span", isLit ? "lit" : "", node.pins ? "used" : "", node.has_checkpoint ? "checkpoint" : "", chosen === key ? "chosen" : ""];
  const choose = () => {
    chosen = key;
    for (const other of document.querySelectorAll(".span.chosen")) other.classList.remove("chosen");
    made.classList.add("chosen");
    tell(node);
  };
  const label = `${count(node.tokens)} tokens up to ${count(node.length)}, ${node.hits} hits${node.pins ? `, in use by ${node.pins}` : ""}`;
  const made = h("button", { type: "button", class: classes.join(" "), title: label, ariaLabel: label, onclick: choose }, node.tokens > longest / 20 ? h("span", {}, node.text ?? "(salted)") : null);
  made.style.left = `${(100 * (node.length - node.tokens)) / longest}%`;
  made.style.width = `${(100 * node.tokens) / longest}%`;
  made.style.top = `${row * ROW}px`;
  made.style.height = `${high * ROW}px`;
  made.style.setProperty("--warmth", Math.min(1, Math.log2(1 + node.hits) / 5).toFixed(2));
  return made;
}

function tell(node) {
  const facts = [
    `tokens ${count(node.length - node.tokens)} to ${count(node.length)}`,
    `${count(node.hits)} ${node.hits === 1 ? "prompt" : "prompts"} went on from here`,
    node.pins ? `${node.pins} stand on it now` : "nobody stands on it now",
    `used ${seconds(node.idle_seconds)} before`,
    bytes(node.bytes),
    node.has_checkpoint ? "a prompt can go on from its end" : "no state kept at its end",
    node.is_on_disk ? "on disk too" : "",
  ].filter(Boolean);
  find("node").replaceChildren(h("p", { class: "note" }, facts.join(" · ")), h("pre", {}, node.text ?? "Its text is not told: it was asked under a salt."));
}

// The live view: threads of the batch, rates, gaps and memory, all from the one stream of events.

import { events, get, request } from "/page/api.js";
import { bytes, colour, count, find, h, prepared, seconds } from "/page/dom.js";
import * as tree from "/page/tree.js";
import { explain } from "/page/why.js";

const WINDOW = 30; // seconds of threads
const HISTORY = 120; // seconds of rates
const STALL = 0.7; // seconds without a token that are worth showing
const MAX_LANES = 24;
const STATES = ["queued", "following", "prefill", "decode", "constrained", "stalled", "resumed"];

const lanes = new Map(); // by request id
const history = [];
let models = [];
let skew = 0; // the server's clock less ours, in seconds
let chosen = null;
let hears = () => {};

const now = () => Date.now() / 1e3 + skew;

// ---- what comes in

/** Listen for ever; after a break once more. */
async function listen() {
  for (let pause = 1; ; pause = Math.min(pause * 2, 10)) {
    try {
      const response = await request("/v1/events");
      for (const lane of lanes.values()) if (!lane.ended) lanes.delete(lane.id); // what ended meanwhile is not told
      for await (const event of events(response)) {
        pause = 1;
        take(event);
      }
    } catch {
      // Gone: said below.
    }
    hears(null);
    await new Promise((wake) => setTimeout(wake, pause * 1e3));
  }
}

function take(event) {
  skew = event.time - Date.now() / 1e3;
  models = event.models;
  for (const row of event.requests) takeRow(row, event.time);
  const sum = (name) => models.reduce((total, model) => total + (model[name] ?? 0), 0);
  const gaps = models.map((model) => model.gaps).find(Boolean) ?? null;
  const drafts = (name) => models.reduce((total, model) => total + (model.drafts?.[name] ?? 0), 0);
  const drafted = { verified: drafts("verified"), tokens: drafts("tokens"), accepted: drafts("accepted") }; // since the start
  history.push({ at: event.time, tokens: sum("tokens_per_second"), read: sum("prompt_tokens_per_second"), rows: sum("rows_running"), gaps, drafted });
  while (history[0].at < event.time - HISTORY) history.shift();
  hears(models);
  if (event.requests.some((row) => row.state === "finished" || row.state === "decode")) tree.stale();
  if (!find("live").hidden) drawFigures();
}

function takeRow(row, at) {
  let lane = lanes.get(row.id);
  if (!lane || (lane.ended && row.state !== "finished")) {
    lane = { id: row.id, spans: [], marks: [], tokens: 0, tokenAt: at, resumed: 0, arrived: row.arrived ?? at };
    lanes.set(row.id, lane);
  }
  if (row.state === "finished") {
    finish(lane, row, at);
  } else {
    const state = row.state === "decode" && row.constrained ? "constrained" : row.state;
    extend(lane, state, at);
  }
  if (row.tokens > lane.tokens) {
    if (lane.tokens && at - lane.tokenAt > STALL) stall(lane, at);
    lane.tokenAt = at;
  }
  if (row.resumed > lane.resumed) lane.marks.push(at);
  Object.assign(lane, row);
  lane.tokens = row.tokens ?? 0;
}

function extend(lane, state, at) {
  const last = lane.spans.at(-1);
  if (last?.state === state) return;
  if (last) last.to = at;
  lane.spans.push({ state, from: last ? at : lane.arrived, to: null });
}

/** A span without tokens inside the decoding. */
function stall(lane, at) {
  const last = lane.spans.at(-1);
  if (!last || last.to !== null) return;
  lane.spans.splice(-1, 1, { ...last, to: lane.tokenAt }, { state: "stalled", from: lane.tokenAt, to: at }, { ...last, from: at });
}

/** It is over: the engine's own times are truer than what a look every quarter of a second could see. */
function finish(lane, row, at) {
  const decoding = row.constrained ? "constrained" : "decode";
  const last = lane.spans.at(-1);
  if (last) last.to ??= at;
  const seen = lane.spans.some((span) => ["following", "stalled"].includes(span.state)) || row.resumed;
  if (row.queue_seconds !== undefined && !seen) {
    const admitted = row.arrived + row.queue_seconds;
    const first = admitted + row.prefill_seconds;
    const ends = Math.max(first + row.decode_seconds, first);
    lane.spans = [
      { state: "queued", from: row.arrived, to: admitted },
      { state: "prefill", from: admitted, to: first },
      { state: decoding, from: first, to: ends },
    ];
    lane.ended = ends;
  }
  lane.ended ??= at;
  if (chosen === null) offerWhy(row.id);
}

// ---- threads

function shown() {
  const since = now() - WINDOW;
  for (const [id, lane] of lanes) if (lane.ended && lane.ended < since) lanes.delete(id);
  const all = [...lanes.values()].sort((one, other) => one.arrived - other.arrived);
  const living = all.filter((lane) => !lane.ended);
  const ended = all.filter((lane) => lane.ended);
  const room = Math.max(0, MAX_LANES - living.length);
  const kept = new Set([...living.slice(0, MAX_LANES), ...(room ? ended.slice(-room) : [])]);
  return all.filter((lane) => kept.has(lane));
}

function drawLanes() {
  const list = find("lanes");
  const drawn = shown();
  const wanted = new Set(drawn.map((lane) => lane.id));
  for (const item of [...list.children]) if (!wanted.has(item.dataset.id)) item.remove();
  drawn.forEach((lane, place) => {
    let item = list.querySelector(`[data-id="${CSS.escape(lane.id)}"]`);
    item ??= h("li", { dataset: { id: lane.id } }, h("button", { type: "button", onclick: () => show(lane.id) }, h("span", { class: "who" }), h("canvas"), h("span", { class: "how" })));
    if (list.children[place] !== item) list.insertBefore(item, list.children[place] ?? null);
    item.dataset.state = lane.ended ? "finished" : lane.state;
    item.classList.toggle("chosen", lane.id === chosen);
    const [who, canvas, how] = item.firstElementChild.children;
    who.replaceChildren(h("span", {}, lane.wire ?? ""), lane.id.slice(0, 6));
    who.title = `${lane.wire ?? ""} ${lane.model ?? ""} ${lane.id}`;
    how.textContent = words(lane);
    drawThread(canvas, lane);
  });
  find("no-lanes").hidden = drawn.length > 0;
  find("axis").hidden = drawn.length === 0;
}

function words(lane) {
  if (lane.ended) return lane.finish === "error" ? "failed" : lane.finish === "cancelled" ? "cancelled" : `${count(lane.tokens)} tokens`;
  if (lane.state === "prefill") return `${count(lane.computed)}/${count(lane.prompt_tokens)}`;
  if (lane.state === "decode") return now() - lane.tokenAt > STALL ? "stalled" : `${count(lane.tokens)} tokens${lane.replica === undefined ? "" : ` · ${lane.replica}`}`;
  return lane.state;
}

const THICK = { queued: 1.5, following: 3, prefill: 9, decode: 9, constrained: 9, stalled: 1.5 };

function drawThread(canvas, lane) {
  const { pen, width, height } = prepared(canvas);
  const time = now();
  const x = (at) => width * (1 - (time - at) / WINDOW);
  pen.lineCap = "butt";
  for (const span of lane.spans) {
    const to = span.to ?? time;
    const stalledFrom = span.to === null && span.state !== "queued" && lane.tokens && time - lane.tokenAt > STALL ? lane.tokenAt : null;
    stroke(pen, span.state, x(span.from), x(stalledFrom ?? to), height);
    if (stalledFrom) stroke(pen, "stalled", x(stalledFrom), x(to), height);
  }
  pen.fillStyle = colour("resumed");
  for (const at of lane.marks) pen.fillRect(x(at) - 1.5, 1, 3, height - 2);
  if (lane.ended) knot(pen, lane, x(lane.ended), height);
}

function stroke(pen, state, from, to, height) {
  pen.strokeStyle = colour(state);
  pen.lineWidth = THICK[state] ?? 2;
  pen.setLineDash(state === "stalled" ? [2, 3] : []);
  pen.beginPath();
  pen.moveTo(Math.max(from, 0), height / 2);
  pen.lineTo(Math.max(to, from + 1.5, 0), height / 2);
  pen.stroke();
  pen.setLineDash([]);
}

/** The end of a thread: a knot, red where it failed, open where nobody waited for it. */
function knot(pen, lane, x, height) {
  const failed = lane.finish === "error";
  pen.beginPath();
  pen.arc(x + 3, height / 2, 3, 0, 7);
  pen.fillStyle = colour(failed ? "danger" : lane.finish === "cancelled" ? "paper" : lane.constrained ? "constrained" : "decode");
  pen.strokeStyle = colour(failed ? "danger" : "faint");
  pen.lineWidth = 1.2;
  pen.fill();
  if (lane.finish === "cancelled") pen.stroke();
}

// ---- rates, gaps, memory

function drawFigures() {
  const last = history.at(-1);
  const figure = (value, unit, name, kind) => h("span", { class: `figure ${kind}` }, h("b", {}, value), ` ${unit} `, h("small", {}, name));
  find("rates").replaceChildren(
    figure(count(last.tokens), "tokens/s", "generated", "decode"),
    figure(count(last.read), "tokens/s", "of prompts", "prefill"),
    figure(count(last.rows), last.rows === 1 ? "row" : "rows", "in the batch", "rows"),
    ...drafting().map(([value, unit, name]) => figure(value, unit, name, "drafts")),
    ...seeing().map(([value, unit, name]) => figure(value, unit, name, "images")),
    ...standing().map(([value, unit, name]) => figure(value, unit, name, "rows")),
  );
  const gaps = last.gaps ?? history.findLast((one) => one.gaps)?.gaps;
  find("gaps").replaceChildren(...["p50", "p95", "p99"].map((name) => figure(gaps ? seconds(gaps[name]) : "–", "", name, name)));
  drawMemory();
}

/** How many draft tokens were accepted in the time that the charts show; nothing where there were none. */
function drafting() {
  const [first, last] = [history[0].drafted, history.at(-1).drafted];
  const [verified, tokens, accepted] = ["verified", "tokens", "accepted"].map((name) => last[name] - first[name]);
  if (verified <= 0) return []; // fewer than before: a model was unloaded
  return [
    [`${Math.round((100 * accepted) / tokens)} %`, "", "of draft tokens accepted"],
    [(1 + accepted / verified).toFixed(1), "tokens/step", "where drafts were verified"],
  ];
}

/** How many replicas of models that have several are ready, and how many answers were moved; nothing where there are none. */
function standing() {
  const all = models.flatMap((model) => model.replicas ?? []);
  if (all.length === 0) return [];
  const ready = all.filter((one) => one.status === "ready").length;
  const moved = models.reduce((sum, model) => sum + (model.moved ?? 0), 0);
  return [[`${ready}/${all.length}`, "replicas", `ready; ${count(moved)} answers moved`]];
}

/** How many images the engines have encoded, how long one took, and how many were known; nothing where there were none. */
function seeing() {
  const total = (name) => models.reduce((sum, model) => sum + (model.images?.[name] ?? 0), 0);
  const [encoded, hits, spent] = ["encoded", "hits", "seconds"].map(total);
  if (encoded + hits === 0) return [];
  return [[count(encoded), encoded === 1 ? "image" : "images", `encoded${encoded ? `, ${seconds(spent / encoded)} each` : ""}; ${count(hits)} known`]];
}

function drawRates() {
  const { pen, width, height } = prepared(find("rate-chart"));
  const most = nice(Math.max(10, ...history.map((one) => Math.max(one.tokens, one.read))));
  const rows = Math.max(1, ...models.map((model) => model.max_rows ?? 1));
  grid(pen, width, height, most, (value) => count(value));
  plot(pen, width, height, (one) => one.rows / rows, colour("rows"), true);
  plot(pen, width, height, (one) => one.read / most, colour("prefill"));
  plot(pen, width, height, (one) => one.tokens / most, colour("decode"));
}

function drawGaps() {
  const { pen, width, height } = prepared(find("gap-chart"));
  const most = nice(Math.max(0.01, ...history.map((one) => one.gaps?.p99 ?? 0)));
  grid(pen, width, height, most, seconds);
  for (const name of ["p99", "p95", "p50"]) plot(pen, width, height, (one) => (one.gaps ? one.gaps[name] / most : null), colour(name));
}

function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}

function grid(pen, width, height, most, told) {
  pen.font = "11px ui-sans-serif, system-ui, sans-serif";
  pen.textBaseline = "bottom";
  for (const part of [0, 0.5, 1]) {
    const y = Math.round((height - 16) * (1 - part)) + 14.5;
    pen.strokeStyle = colour("line");
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(0, y);
    pen.lineTo(width, y);
    pen.stroke();
    pen.fillStyle = colour("faint");
    if (part) pen.fillText(told(most * part), 0, y - 1);
  }
}

function plot(pen, width, height, value, ink, filled = false) {
  const time = now();
  const points = history.map((one) => [width * (1 - (time - one.at) / HISTORY), value(one)]);
  const y = (part) => (height - 16) * (1 - Math.min(1, part)) + 14.5;
  pen.beginPath();
  let open = false;
  for (const [x, part] of points) {
    if (part === null) open = false;
    else if (!open) pen.moveTo(x, y(part)), (open = true);
    else pen.lineTo(x, y(part));
  }
  if (filled && points.length) {
    pen.lineTo(points.at(-1)[0], y(0));
    pen.lineTo(points[0][0], y(0));
    pen.fillStyle = ink;
    pen.fill();
  } else {
    pen.strokeStyle = ink;
    pen.lineWidth = 1.8;
    pen.lineJoin = "round";
    pen.stroke();
  }
}

/** One bar for each model: what it holds, what is kept back, what is free, and the line up to which rows are let in. */
function drawMemory() {
  const target = find("memory");
  const bars = models.filter((model) => model.memory.active !== undefined).map((model) => {
    const held = model.memory;
    const known = held.weights + held.rows + held.prefixes + (held.images ?? 0);
    const other = Math.max(0, held.active - known);
    const used = known + other + held.reusable;
    const whole = Math.max(held.budget ?? 0, used + (held.reserve ?? 0));
    const free = Math.max(0, whole - used - (held.reserve ?? 0));
    const parts = [
      ["weights", held.weights], ["rows", held.rows], ["kept prompts", held.prefixes], ["kept images", held.images ?? 0], ["other work", other],
      ["to be reused", held.reusable], ["free", free], ["reserve", held.reserve ?? 0],
    ].filter(([, size]) => size > 0);
    const piece = ([name, size]) => {
      const box = h("i", { class: name.replaceAll(" ", "-"), title: `${name}: ${bytes(size)}` });
      box.style.flexGrow = size / whole;
      return box;
    };
    const bar = h("div", { class: "bar", role: "img", ariaLabel: parts.map(([name, size]) => `${name} ${bytes(size)}`).join(", ") }, ...parts.map(piece));
    const limits = held.budget ? [line(1 - held.reserve / whole, "rows are let in up to here", "admission"), held.promised ? line((held.weights + held.promised) / whole, "promised to running rows", "promised") : null].filter(Boolean) : [];
    const legend = parts.map(([name, size]) => h("span", {}, h("i", { class: name.replaceAll(" ", "-") }), `${name} `, h("b", {}, bytes(size))));
    const of = held.budget ? `${bytes(used)} of ${bytes(held.budget)}` : `${bytes(used)}, no limit set`;
    const promised = held.promised ? ` · ${bytes(held.promised)} promised to running rows` : "";
    return h("div", { class: "memory" }, h("p", { class: "note" }, models.length > 1 ? `${model.name}: ` : "", of, promised), h("div", { class: "bar-box" }, bar, ...limits), h("p", { class: "legend" }, ...legend));
  });
  target.replaceChildren(...bars);
}

function line(place, title, kind) {
  const mark = h("span", { class: `limit ${kind}`, title });
  mark.style.left = `${(100 * Math.min(1, place)).toFixed(2)}%`;
  return mark;
}

// ---- why

/** Show one request's story, and keep to it. */
export async function show(id) {
  chosen = id;
  await offerWhy(id);
  if (chosen === id) find("why").scrollIntoView({ block: "nearest", behavior: "smooth" });
}

async function offerWhy(id) {
  if (find("live").hidden && chosen !== id) return;
  try {
    find("why").replaceChildren(explain(await get(`/v1/cache/requests/${encodeURIComponent(id)}`)));
  } catch (error) {
    find("why").replaceChildren(h("p", { class: "empty" }, error.message));
  }
}

// ---- beginning

let drawnAt = 0;

function frame(at) {
  requestAnimationFrame(frame);
  if (find("live").hidden || at - drawnAt < 250) return; // as often as there is news; more would only warm the machine that should be answering
  drawnAt = at;
  drawLanes();
  if (history.length) {
    drawRates();
    drawGaps();
  }
}

export function begin(hear) {
  hears = hear;
  find("states").append(...STATES.map((state) => h("span", {}, h("i", { class: state }), state)));
  find("axis").append(...[30, 20, 10, 0].map((ago) => h("span", {}, ago ? `${ago} s ago` : "now")));
  requestAnimationFrame(frame);
  tree.begin();
  listen();
}

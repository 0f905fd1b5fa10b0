// The chat: a conversation is a tree of messages, of which one path is shown. Editing and asking again make branches.

import { events, get, request } from "/page/api.js";
import { bytes, count, find, h, memory, seconds } from "/page/dom.js";
import * as images from "/page/images.js";
import { code, copied, render } from "/page/markdown.js";

const OPTIONS = [
  { name: "system", label: "System prompt", kind: "text", rows: 3 },
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.1 },
  { name: "top_p", label: "Top p", min: 0.05, max: 1, step: 0.05 },
  { name: "top_k", label: "Top k", min: 0, step: 1 },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01 },
  { name: "max_tokens", label: "Longest answer, tokens", min: 1, step: 1, hint: "the rest of the context" },
  { name: "seed", label: "Seed", step: 1, hint: "another one each time" },
  { name: "logprobs", label: "Keep token probabilities", kind: "check" },
  { name: "schema", label: "JSON schema of the answer", kind: "json", rows: 5, hint: '{"type": "object", …}' },
  { name: "tools", label: "Tools", kind: "json", rows: 4, hint: '[{"type": "function", "function": {"name": …}}]' },
];

let talk = memory.get("talk", null) ?? fresh();
const settings = memory.get("settings", {});
let running = null; // the AbortController of the answer on its way
let editing = null; // the id of the message being edited
let showRequest = () => {};
let states = ""; // of the models, as of when their capabilities were asked for
let capabilities = new Map(); // by model; undefined before it is loaded

function fresh() {
  return { id: crypto.randomUUID?.() ?? String(Math.random()).slice(2), nodes: {}, chosen: {}, next: 1 };
}

// ---- the tree

const children = (parent) => Object.values(talk.nodes).filter((node) => node.parent === parent);

/** The messages that are shown: at every fork the chosen one, else the newest. */
function path(last = null) {
  const found = [];
  for (let at = "root"; ; at = found.at(-1).id) {
    const forks = children(at);
    if (!forks.length || (last !== null && at === last)) return found;
    found.push(forks.find((node) => node.id === talk.chosen[at]) ?? forks.at(-1));
  }
}

function add(parent, fields) {
  const node = { id: `m${talk.next++}`, parent, ...fields };
  talk.nodes[node.id] = node;
  talk.chosen[parent] = node.id;
  return node;
}

/** Keep the conversation in the browser; where it has no room for all images, without those of the oldest messages. */
function save() {
  const pictured = Object.values(talk.nodes).filter((node) => node.images?.some((image) => image.url));
  for (let dropped = 0; dropped <= pictured.length; dropped++) {
    if (!memory.set("talk", withoutImages(pictured.slice(0, dropped)))) continue;
    if (dropped) images.say(`This browser has no room for all images of the conversation: ${dropped === 1 ? "one message loses its images" : `${dropped} messages lose their images`} when the page is loaded again.`);
    return;
  }
}

function withoutImages(nodes) {
  const thin = (node) => [node.id, { ...node, images: node.images.map(({ name }) => ({ name })) }];
  return { ...talk, nodes: { ...talk.nodes, ...Object.fromEntries(nodes.map(thin)) } };
}

// ---- what is asked

function parsed(name) {
  const text = (settings[name] ?? "").trim();
  return text ? JSON.parse(text) : undefined;
}

function asked() {
  const body = { model: find("model").value };
  for (const { name, kind } of OPTIONS) {
    if (!kind && settings[name] !== undefined && settings[name] !== "") body[name] = Number(settings[name]);
  }
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  const schema = parsed("schema");
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  const tools = parsed("tools");
  if (tools) body.tools = tools;
  return { ...body, prompt_cache_key: talk.id, stream: true, stream_options: { include_usage: true } };
}

/** A path in the words of the wire. */
function spoken(nodes) {
  const system = (settings.system ?? "").trim();
  const said = nodes.filter((node) => !node.error || node.content).map((node) => {
    if (node.role === "tool") return { role: "tool", tool_call_id: node.call, content: node.content };
    const message = { role: node.role, content: contentOf(node) };
    if (node.calls?.length) {
      message.tool_calls = node.calls.map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text } }));
    }
    return message;
  });
  return system ? [{ role: "system", content: system }, ...said] : said;
}

/** A message's text; where it has images, a list of parts with the images before the text. */
function contentOf({ content, images: pictures = [] }) {
  const parts = pictures.filter(({ url }) => url).map(({ url }) => ({ type: "image_url", image_url: { url } }));
  if (!parts.length) return content;
  return content ? [...parts, { type: "text", text: content }] : parts;
}

/** A request as text to read: images are named by their beginning and their size. */
function legible(body) {
  const short = (key, value) => (key === "url" && value.startsWith?.("data:") ? `${value.slice(0, 40)}… (${bytes(value.length)})` : value);
  return JSON.stringify(body, short, 2);
}

// ---- an answer on its way

/** Answer what `parent` says, as a new branch under it. */
async function answer(parent) {
  let body;
  try {
    body = asked();
  } catch (error) {
    openDrawer();
    find("raw").textContent = `Not valid JSON: ${error.message}`;
    return;
  }
  const messages = spoken(path(parent));
  const node = add(parent, { role: "assistant", content: "", reasoning: "", calls: [], model: body.model, asked: body });
  running = new AbortController();
  draw();
  try {
    const response = await request("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ ...body, messages }),
      signal: running.signal,
    });
    node.request = response.headers.get("x-request-id");
    for await (const event of events(response)) {
      take(node, event);
      later(node);
    }
    if (!node.finish && !node.error) node.error = "The stream ended before the answer did.";
  } catch (error) {
    if (error.name === "AbortError") node.finish = "stopped";
    else node.error = error.message;
  } finally {
    running = null;
    save();
    draw();
  }
}

function take(node, event) {
  if (event.error) node.error = event.error.message;
  if (event.usage) node.usage = event.usage;
  if (event.timings) node.timings = event.timings;
  for (const choice of event.choices ?? []) {
    const { content, reasoning_content: reasoning, tool_calls: calls = [] } = choice.delta;
    node.content += content ?? "";
    node.reasoning += reasoning ?? "";
    for (const call of calls) {
      const kept = (node.calls[call.index] ??= { id: call.id, name: "", text: "" });
      kept.name += call.function?.name ?? "";
      kept.text += call.function?.arguments ?? "";
    }
    const tokens = choice.logprobs?.content;
    if (tokens?.length) {
      const thin = ({ token, logprob, top_logprobs: top }) => [token, logprob, top.map((one) => [one.token, one.logprob])];
      (node.tokens ??= []).push(...tokens.map(thin));
    }
    node.finish = choice.finish_reason ?? node.finish;
  }
}

let due = null;

/** Show what is new with the next frame; several events may come before it. */
function later(node) {
  due ??= requestAnimationFrame(() => {
    due = null;
    const item = find("messages").querySelector(`[data-id="${node.id}"]`);
    if (!item) return;
    const stay = nearEnd();
    fill(item, node);
    if (stay) toEnd();
  });
}

// ---- what is shown

const nearEnd = () => find("messages").scrollHeight - find("messages").scrollTop - find("messages").clientHeight < 80;
const toEnd = () => find("messages").scrollTo({ top: find("messages").scrollHeight });

function draw() {
  const shown = path();
  const list = find("messages");
  const stay = nearEnd() || running !== null;
  list.replaceChildren(...shown.map((node) => fill(h("li", { class: node.role, dataset: { id: node.id } }), node)));
  if (!shown.length) list.append(h("li", { class: "welcome" }, h("p", {}, "Ask something.")));
  find("send").hidden = running !== null;
  find("stop").hidden = running === null;
  if (stay) toEnd();
  drawRaw();
}

function fill(item, node) {
  if (editing === node.id) {
    item.replaceChildren(editor(node));
    return item;
  }
  const isRunning = running !== null && node === path().at(-1) && node.role === "assistant";
  item.classList.toggle("running", isRunning);
  part(item, "think", node.reasoning?.trim(), () => thinking(), (box) => {
    box.querySelector("summary").textContent = node.content || !isRunning ? "Thought" : "Thinking…";
    render(box.querySelector("div"), node.reasoning);
  });
  part(item, "images", node.images?.length, () => h("div"), (box) => box.replaceChildren(...images.thumbnails(node.images)));
  part(item, "prose", true, () => h("div"), (box) => {
    if (node.role === "assistant" && !node.showTokens) render(box, node.content);
    else if (node.showTokens) box.replaceChildren(heat(node));
    else box.textContent = node.content;
  });
  part(item, "calls", node.calls?.length, () => h("div"), (box) => box.replaceChildren(...node.calls.map((call) => toolCall(node, call))));
  part(item, "problem", node.error, () => h("p", { role: "alert" }), (box) => (box.textContent = node.error));
  part(item, "sent", node.showRaw, () => h("div"), (box) => box.replaceChildren(code(sent(node), "json")));
  part(item, "foot", !isRunning, () => h("footer"), (box) => box.replaceChildren(...footer(node)));
  return item;
}

/** A part of a message that is there when `wanted`; made once, filled every time. */
function part(item, name, wanted, make, update) {
  let box = item.querySelector(`:scope > .${name}`);
  if (!wanted) {
    box?.remove();
    return;
  }
  if (!box) {
    box = make();
    box.classList.add(name);
    const order = ["think", "images", "prose", "calls", "problem", "sent", "foot"];
    const after = [...item.children].find((other) => order.indexOf(other.classList[0]) > order.indexOf(name));
    item.insertBefore(box, after ?? null);
  }
  update(box);
}

const thinking = () => h("details", { class: "think" }, h("summary"), h("div"));

function toolCall(node, call) {
  let text = call.text;
  try {
    text = JSON.stringify(JSON.parse(call.text), null, 2);
  } catch {
    // Not whole yet, or cut: as it is.
  }
  const result = children(node.id).length === 0 && node.finish === "tool_calls" ? resultForm(node, call) : null;
  return h("div", { class: "call" }, h("p", {}, h("span", { class: "label" }, "calls"), " ", h("code", {}, call.name)), code(text, ""), result);
}

/** Where a person plays the tool. */
function resultForm(node, call) {
  const field = h("input", { ariaLabel: `Result of ${call.name}`, placeholder: "its result", value: call.result ?? "" });
  const give = (event) => {
    event.preventDefault();
    call.result = field.value;
    if (node.calls.some((one) => one.result === undefined)) return;
    let parent = node.id;
    for (const one of node.calls) parent = add(parent, { role: "tool", content: one.result, call: one.id }).id;
    answer(parent);
  };
  return h("form", { class: "row", onsubmit: give }, field, h("button", {}, "Return"));
}

/** The answer token by token, each as dark as it was unlikely. */
function heat(node) {
  const told = h("p", { class: "alternatives", ariaLive: "polite" }, "Choose a token to see what else it might have been.");
  const tell = (top, logprob, token) => {
    const row = ([text, value]) =>
      h("li", { class: text === token ? "chosen" : "" }, h("code", {}, visible(text)), ` ${(100 * Math.exp(value)).toFixed(1)} %`);
    const rows = top.some(([text]) => text === token) ? top : [[token, logprob], ...top];
    told.replaceChildren(h("ol", {}, ...rows.map(row)));
  };
  const span = ([token, logprob, top]) => {
    const level = Math.min(5, Math.floor(-logprob * 1.6));
    const title = `${(100 * Math.exp(logprob)).toFixed(1)} %`;
    return h("button", { type: "button", class: `token heat${level}`, title, onclick: () => tell(top, logprob, token) }, token);
  };
  return h("div", {}, h("p", { class: "tokens" }, ...node.tokens.map(span)), told);
}

const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";

function sent(node) {
  const before = path(node.parent).filter((one) => one.id !== node.id);
  const reply = { usage: node.usage, timings: node.timings, finish_reason: node.finish };
  return legible({ request: { ...node.asked, messages: spoken(before) }, reply });
}

function footer(node) {
  const act = (label, action) => h("button", { type: "button", class: "quiet", disabled: running !== null, onclick: action }, label);
  const made = [branches(node)];
  if (node.role === "user") made.push(act("Edit", () => edit(node)));
  if (node.role === "assistant") {
    const copy = act("Copy", () => copied(copy, node.content));
    made.push(copy, act("Again", () => answer(node.parent)));
    if (node.tokens) made.push(act(node.showTokens ? "Text" : "Probabilities", () => toggle(node, "showTokens")));
    made.push(act("Raw", () => toggle(node, "showRaw")));
    if (node.request && node.timings) made.push(act("Why?", () => showRequest(node.request)));
    made.push(h("span", { class: "space" }), h("span", { class: "facts" }, facts(node)));
  }
  return made.filter(Boolean);
}

function facts(node) {
  const told = [];
  if (node.usage) {
    const { completion_tokens: tokens, prompt_tokens: prompt, prompt_tokens_details: details } = node.usage;
    told.push(`${count(tokens)} tokens`);
    if (node.timings?.predicted_per_second) told.push(`${count(node.timings.predicted_per_second)} a second`);
    if (node.timings) told.push(`first after ${seconds((node.timings.queue_ms + node.timings.prompt_ms) / 1e3)}`);
    if (details?.cached_tokens) told.push(`${count(details.cached_tokens)} of ${count(prompt)} known`);
  }
  if (node.finish === "length") told.push("cut at its limit");
  if (node.finish === "stopped") told.push("stopped");
  return told.join(" · ");
}

function branches(node) {
  const all = children(node.parent);
  if (all.length < 2) return null;
  const at = all.indexOf(node);
  const go = (step) => {
    talk.chosen[node.parent] = all[at + step].id;
    save();
    draw();
  };
  const arrow = (label, name, step) =>
    h("button", { type: "button", class: "quiet", ariaLabel: name, disabled: running !== null || !all[at + step], onclick: () => go(step) }, label);
  return h("span", { class: "branches" }, arrow("‹", "Branch before", -1), `${at + 1}/${all.length}`, arrow("›", "Next branch", 1));
}

function toggle(node, name) {
  node[name] = !node[name];
  save();
  draw();
}

function edit(node) {
  editing = node.id;
  draw();
  const field = find("messages").querySelector("textarea");
  field.focus();
  field.setSelectionRange(field.value.length, field.value.length);
}

function editor(node) {
  const field = h("textarea", { value: node.content, rows: Math.min(12, node.content.split("\n").length + 1), ariaLabel: "Edit the message" });
  let pictures = (node.images ?? []).filter(({ url }) => url);
  const box = h("div", { class: "images" });
  const show = () => box.replaceChildren(...images.thumbnails(pictures, remove));
  const remove = (place) => {
    pictures = pictures.filter((_, other) => other !== place);
    show();
    field.focus();
  };
  const leave = () => {
    editing = null;
    draw();
  };
  const send = (event) => {
    event?.preventDefault();
    editing = null;
    const text = field.value.trim() && field.value;
    if (!text && !pictures.length) return draw();
    answer(add(node.parent, asking(text, pictures)).id);
  };
  const keys = (event) => {
    if (event.key === "Escape") leave();
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  };
  field.addEventListener("keydown", keys);
  const buttons = h("div", { class: "row" }, h("span", { class: "space" }), h("button", { type: "button", class: "quiet", onclick: leave }, "Leave"), h("button", { class: "strong" }, "Send"));
  show();
  return h("form", { class: "editor", onsubmit: send }, box, field, buttons);
}

// ---- the drawer

function openDrawer(open = true) {
  find("drawer").hidden = !open;
  find("settings").setAttribute("aria-expanded", String(open));
  drawRaw();
}

function drawRaw() {
  if (find("drawer").hidden) return;
  try {
    const draft = find("draft").value.trim();
    const messages = spoken(path());
    const pictures = images.attached();
    if (draft || pictures.length) messages.push({ role: "user", content: contentOf({ content: draft, images: pictures }) });
    find("raw").textContent = legible({ ...asked(), messages });
  } catch (error) {
    find("raw").textContent = `Not valid JSON: ${error.message}`;
  }
}

function option({ name, label, kind, rows, hint, ...bounds }) {
  const id = `option-${name}`;
  const change = (event) => {
    const { value, checked } = event.target;
    if (kind === "check") settings[name] = checked;
    else if (value === "") delete settings[name];
    else settings[name] = value;
    memory.set("settings", settings);
    drawRaw();
  };
  const common = { id, oninput: change };
  const field =
    kind === "check" ? h("input", { ...common, type: "checkbox", checked: settings[name] ?? false })
    : kind ? h("textarea", { ...common, rows, placeholder: hint ?? "", spellcheck: kind !== "json", class: kind === "json" ? "mono" : "", value: settings[name] ?? "" })
    : h("input", { ...common, type: "number", placeholder: hint ?? "as the model's makers advise", ...bounds, value: settings[name] ?? "" });
  return h("div", { class: `option ${kind ?? ""}` }, h("label", { htmlFor: id }, label), field);
}

// ---- beginning

const asking = (content, pictures) => ({ role: "user", content, ...(pictures.length ? { images: pictures } : {}) });

async function submit(event) {
  event?.preventDefault();
  const isWhole = await images.settled();
  const draft = find("draft");
  const text = draft.value.trim();
  if (running || !isWhole || !(text || images.attached().length)) return;
  const problem = images.attached().length ? blindness() : "";
  images.say(problem);
  if (problem) return;
  const node = add(path().at(-1)?.id ?? "root", asking(text, images.takeAll()));
  draft.value = "";
  grow();
  answer(node.id);
}

function grow() {
  const draft = find("draft");
  draft.style.height = "auto";
  draft.style.height = `${Math.min(draft.scrollHeight, 240)}px`;
}

/** Make a change of the composer's height, and stay at the end of the conversation where one was there. */
function withMessagesInView(change) {
  const stay = nearEnd();
  change();
  if (stay) toEnd();
  drawRaw();
}

/** Why the chosen model reads no images, in a sentence; empty where it does. */
function blindness() {
  const name = find("model").value;
  const able = capabilities.get(name);
  if (able?.includes("vision")) return "";
  return able ? `${name} reads text only. Images need a model with vision.` : "Images can be added as soon as a model is loaded.";
}

/** Ask what the models can do; that is known of a model once it is loaded. */
async function learn(models) {
  const now = models.map(({ name, status }) => `${name} ${status}`).join();
  if (now === states) return;
  states = now;
  try {
    const { data } = await get("/v1/models");
    capabilities = new Map(data.map((model) => [model.id, model.capabilities]));
    images.refresh();
  } catch {
    states = ""; // with the next event once more
  }
}

/** The models one can talk to. */
export function offer(models) {
  learn(models);
  const select = find("model");
  const before = select.value || memory.get("model", "");
  const names = models.filter((model) => !["failed", "unloading"].includes(model.status)).map((model) => model.name);
  if ([...select.options].map((one) => one.value).join() === names.join()) return;
  select.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
  if (names.includes(before)) select.value = before;
  images.refresh();
  drawRaw();
}

export function begin(show) {
  showRequest = show;
  images.begin(blindness, withMessagesInView);
  find("options").append(...OPTIONS.map(option));
  find("options").addEventListener("submit", (event) => event.preventDefault());
  find("composer").addEventListener("submit", submit);
  find("draft").addEventListener("input", () => (grow(), drawRaw()));
  find("draft").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  });
  find("model").addEventListener("change", () => (memory.set("model", find("model").value), images.refresh(), drawRaw()));
  find("stop").addEventListener("click", () => running?.abort());
  find("settings").addEventListener("click", () => openDrawer(find("drawer").hidden));
  find("close").addEventListener("click", () => (openDrawer(false), find("settings").focus()));
  find("renew").addEventListener("click", () => {
    running?.abort();
    talk = fresh();
    editing = null;
    images.takeAll();
    images.say();
    save();
    draw();
    find("draft").focus();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || find("chat").hidden || find("ask-key").open) return;
    if (running) running.abort();
    else if (!find("drawer").hidden) openDrawer(false);
  });
  draw();
}

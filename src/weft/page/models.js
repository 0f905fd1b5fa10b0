// What is loaded, with state, limits and memory; what else is on this machine, whether it fits; load and unload.

import { get, post } from "/page/api.js";
import { bytes, count, find, h } from "/page/dom.js";

const OLD = 10_000; // milliseconds after which one looks again what is on this machine
const problems = new Map(); // what went wrong with a model, in the server's words
let choices = null;
let lookedAt = 0;
let states = "";

export async function draw() {
  const status = await get("/v1/status");
  const now = JSON.stringify(status.models.map((model) => [model.id, model.status.value]));
  if (now !== states || Date.now() - lookedAt > OLD) {
    choices = await get("/v1/models/available");
    [states, lookedAt] = [now, Date.now()];
  }
  if (find("models").querySelector("button:active") || find("ask").open) return; // a click or the focus would be lost
  const focused = document.activeElement?.dataset.key;
  show(status);
  if (focused) focus((key) => key === focused);
}

function focus(isWanted) {
  [...find("models").querySelectorAll("button[data-key]")].find((button) => isWanted(button.dataset.key))?.focus();
}

function show(status) {
  const loaded = new Set(status.models.map((model) => model.id));
  const others = choices.data.filter((choice) => !loaded.has(choice.id));
  const none = h("p", { class: "empty" }, "No model is loaded. Load one of those below.");
  find("served").replaceChildren(...(loaded.size ? status.models.map(card) : [none]));
  find("free").textContent = choices.free_bytes === null ? "" : `One more model could have ${bytes(choices.free_bytes)} of memory.`;
  find("choices").replaceChildren(...others.map(row), ...(others.length ? [] : [h("li", { class: "empty" }, "Everything here is loaded.")]));
  find("about").replaceChildren(`weft ${status.version}, up for ${ago(status.uptime_seconds)}. More models: `, h("code", {}, "weft pull MODEL"));
}

function hits({ prompt_tokens: all, cached_tokens: known }) {
  return all ? `${Math.round((100 * known) / all)} % of prompts known` : "no prompt yet";
}

function card(model) {
  const { memory, condition } = model;
  const rows = [
    ["state", condition.progress ? `loading: ${condition.progress.what}` : model.status.value],
    ["context", model.context_length && `${count(model.context_length)} tokens`],
    ["can", model.capabilities && ["chat", ...model.capabilities].join(", ")],
    ["drafts from", model.speculation && (model.speculation.sources.join(", ") || "nowhere")],
    ["rows", `${model.rows_running} running, ${model.rows_waiting} waiting`],
    ["weights", memory.weights !== undefined && bytes(memory.weights)],
    ["memory in use", memory.active !== undefined && `${bytes(memory.active)}${memory.budget ? ` of ${bytes(memory.budget)}` : ""}`],
    ["at its highest", memory.peak !== undefined && bytes(memory.peak)],
    ["kept prompts", memory.prefixes !== undefined && bytes(memory.prefixes)],
    ["kept images", memory.images !== undefined && bytes(memory.images)],
    ["engine", `process ${model.engine_pid ?? "–"}, replaced ${model.engine_restarts} times`],
    ...(model.replicas ?? []).map((one) => [`replica ${one.name}`, `${one.status}, ${one.rows_running} running, ${hits(one)}, process ${one.engine_pid ?? "–"}`]),
    ["moved", model.replicas && `${model.moved} answers to another replica`],
    ["notice", model.notice],
  ].filter(([, value]) => value);
  const list = h("dl", {}, ...rows.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
  const failed = model.status.value === "failed";
  return h(
    "article",
    { class: "model" },
    h(
      "div",
      { class: "row" },
      h("h2", {}, h("i", { class: `dot ${model.status.value}` }), model.id),
      h("span", { class: "space" }),
      failed && button("Load", "Load again", model.id, () => load(model.id)),
      button("Unload", failed ? "Remove" : "Unload", model.id, () => (failed ? unload(model.id) : askUnload(model)), model.status.value === "unloading"),
    ),
    condition.progress && progress(condition.progress, model.id),
    problem(condition.message ?? problems.get(model.id)),
    list,
  );
}

function row(choice) {
  const { id, verdict, needed_bytes: needed } = choice;
  const size = choice.is_here ? `${bytes(choice.size_bytes)} on disk` : "not fetched yet";
  const words = verdict === "unknown" ? "whether it fits is not known" : `${verdict}: it needs at least ${bytes(needed)} of ${bytes(choices.free_bytes)}`;
  return h(
    "li",
    {},
    h("div", { class: "row" }, h("b", {}, id), h("span", { class: "space" }), button("Load", choice.is_here ? "Load" : "Fetch and load", id, () => askLoad(choice))),
    h("p", {}, h("i", { class: `dot ${verdict}` }), ` ${words}; ${size}`),
    problem(problems.get(id)),
  );
}

const button = (what, label, id, onclick, disabled) =>
  h("button", { type: "button", onclick, disabled, "aria-label": `${label} ${id}`, dataset: { key: `${what} ${id}` } }, label);
const problem = (words) => words && h("p", { class: "problem" }, words);
const progress = ({ done, total }, id) => h("progress", { "aria-label": `Loading ${id}`, ...(total ? { max: total, value: done } : {}) });

async function askLoad({ id, verdict, is_here: isHere, needed_bytes: needed }) {
  const force = verdict === "does not fit";
  if (!isHere && !(await agreed(`Download ${id}?`, "It is not on this machine. The server fetches it first.", "Download"))) return;
  if (force && !(await agreed(`Load ${id} all the same?`, `It needs at least ${bytes(needed)}, and ${bytes(choices.free_bytes)} are free.`, "Load"))) return;
  await load(id, { fetch: !isHere, force });
}

async function askUnload({ id, rows_running: rows }) {
  const words = rows ? `${rows} answers are running; they have a few seconds to end.` : "Nothing is running on it.";
  if (await agreed(`Unload ${id}?`, `${words} Its memory is free afterwards.`, "Unload")) await unload(id);
}

const load = (model, more = {}) => tell("/v1/models/load", { model, ...more });
const unload = (model) => tell("/v1/models/unload", { model });

async function tell(path, body) {
  problems.delete(body.model);
  const done = post(path, body).catch((error) => problems.set(body.model, error.message));
  await Promise.race([done, new Promise((resolve) => setTimeout(resolve, 100))]);
  await draw(); // an unloading takes its time, and is shown meanwhile
  await done;
  await draw();
  if (document.activeElement === document.body) focus((key) => key.endsWith(` ${body.model}`)); // its button went elsewhere
}

/** Whether the person in front agrees. */
function agreed(title, words, yes) {
  const dialog = find("ask");
  find("ask-title").textContent = title;
  find("ask-words").textContent = words;
  find("ask-yes").textContent = yes;
  dialog.returnValue = "no"; // what Escape gives
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

function ago(value) {
  if (value < 120) return `${Math.round(value)} seconds`;
  return value < 7200 ? `${Math.round(value / 60)} minutes` : `${(value / 3600).toFixed(1)} hours`;
}

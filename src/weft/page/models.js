// What is served: state, limits and memory of each model.

import { get } from "/page/api.js";
import { bytes, count, find, h } from "/page/dom.js";

export async function draw() {
  const status = await get("/v1/status");
  find("served").replaceChildren(
    ...status.models.map(card),
    h("p", { class: "note" }, `weft ${status.version}, up for ${ago(status.uptime_seconds)}. To serve other models start it with their names: `, h("code", {}, "weft serve MODEL …")),
  );
}

function card(model) {
  const { memory } = model;
  const rows = [
    ["state", model.status.value],
    ["context", model.context_length && `${count(model.context_length)} tokens`],
    ["can", ["chat", ...(model.capabilities ?? [])].join(", ")],
    ["rows", `${model.rows_running} running, ${model.rows_waiting} waiting`],
    ["weights", memory.weights !== undefined && bytes(memory.weights)],
    ["memory in use", memory.active !== undefined && `${bytes(memory.active)}${memory.budget ? ` of ${bytes(memory.budget)}` : ""}`],
    ["at its highest", memory.peak !== undefined && bytes(memory.peak)],
    ["kept prompts", memory.prefixes !== undefined && bytes(memory.prefixes)],
    ["engine", `process ${model.engine_pid ?? "–"}, replaced ${model.engine_restarts} times`],
    ["notice", model.notice],
  ].filter(([, value]) => value);
  const list = h("dl", {}, ...rows.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
  return h("article", { class: "model" }, h("h2", {}, h("i", { class: `dot ${model.status.value}` }), model.id), list);
}

function ago(value) {
  if (value < 120) return `${Math.round(value)} seconds`;
  return value < 7200 ? `${Math.round(value / 60)} minutes` : `${(value / 3600).toFixed(1)} hours`;
}

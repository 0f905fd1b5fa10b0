// The frame: tabs, light and dark, and the line that says how the server is.

import * as chat from "/page/chat.js";
import { find, forgetColours, h, memory } from "/page/dom.js";
import * as live from "/page/live.js";
import * as models from "/page/models.js";

const TABS = ["chat", "live", "models"];
const THEMES = { auto: "Auto", light: "Light", dark: "Dark" };

function open(name) {
  for (const tab of TABS) {
    const isOpen = tab === name;
    find(tab).hidden = !isOpen;
    find(`tab-${tab}`).setAttribute("aria-selected", String(isOpen));
    find(`tab-${tab}`).tabIndex = isOpen ? 0 : -1;
  }
  if (name === "models") models.draw().catch(() => {});
  if (location.hash !== `#${name}`) history.replaceState(null, "", `#${name}`);
}

const wanted = () => (TABS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "chat");

function keys(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const next = TABS[(TABS.indexOf(wanted()) + step + TABS.length) % TABS.length];
  open(next);
  find(`tab-${next}`).focus();
}

function dress(theme) {
  document.documentElement.dataset.theme = theme;
  forgetColours();
  find("theme").textContent = THEMES[theme];
  find("theme").setAttribute("aria-label", `Colours: ${THEMES[theme]}`);
  memory.set("theme", theme);
}

function turn() {
  const names = Object.keys(THEMES);
  dress(names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length]);
}

/** How the server is, in a few words; null: it does not answer. */
function pulse(served) {
  const worst = served?.find((model) => model.status !== "ready");
  const rows = served?.reduce((sum, model) => sum + model.rows_running, 0);
  const waiting = served?.reduce((sum, model) => sum + model.rows_waiting, 0);
  const loading = worst?.progress ? `loading ${worst.name}` : worst && `${worst.status}: ${worst.name}`;
  const words = !served ? "not reachable" : !served.length ? "no model loaded" : loading ?? (rows || waiting ? `${rows} running${waiting ? `, ${waiting} waiting` : ""}` : "ready");
  const state = !served || worst?.status === "failed" ? "failed" : worst ? "loading" : rows ? "busy" : served.length ? "ready" : "none";
  find("pulse").replaceChildren(h("i", { class: `dot ${state}` }), h("span", {}, words));
  if (served) chat.offer(served);
  if (served && !find("models").hidden) slowly();
}

let drawnAt = 0;

function slowly() {
  if (Date.now() - drawnAt < 2000) return;
  drawnAt = Date.now();
  models.draw().catch(() => {});
}

dress(memory.get("theme", "auto"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", forgetColours);
find("theme").addEventListener("click", turn);
find("tabs").addEventListener("keydown", keys);
for (const tab of TABS) find(`tab-${tab}`).addEventListener("click", () => open(tab));
window.addEventListener("hashchange", () => open(wanted()));
open(wanted());
chat.begin((id) => {
  open("live");
  live.show(id);
});
live.begin(pulse);

// Why a request took its time: where the seconds went, and how much of its prompt was known before.

import { count, h, seconds } from "/page/dom.js";

export function explain(report) {
  return h("div", { class: "why" }, h("p", { class: "note" }, `${report.model} · ${report.id}`), waterfall(report), prompt(report), difference(report));
}

function waterfall({ queue_seconds: queue, prefill_seconds: prefill, decode_seconds: decode, completion_tokens: tokens }) {
  const whole = queue + prefill + decode || 1;
  let from = 0;
  const rows = [["waited", queue, "queued"], ["read the prompt", prefill, "prefill"], ["wrote", decode, "decode"]].map(([name, took, kind]) => {
    const bar = h("i", { class: kind });
    bar.style.marginLeft = `${(100 * from) / whole}%`;
    bar.style.width = `${Math.max(0.4, (100 * took) / whole)}%`;
    from += took;
    const rate = kind === "decode" && took && tokens > 1 ? `, ${count((tokens - 1) / took)} tokens/s` : "";
    return h("li", {}, h("span", {}, name), h("span", { class: "track" }, bar), h("b", {}, seconds(took) + rate));
  });
  return h("ol", { class: "waterfall" }, ...rows);
}

function prompt({ prompt_tokens: tokens, cached_tokens: cached, why }) {
  const known = h("i", { class: "kept-prompts" });
  const computed = h("i", { class: "prefill" });
  known.style.flexGrow = cached / tokens;
  computed.style.flexGrow = 1 - cached / tokens;
  const text = `${count(cached)} of ${count(tokens)} tokens of the prompt did not have to be computed`;
  const sentence = why ? `${why[0].toUpperCase()}${why.slice(1)}.` : "";
  return h("div", {}, h("div", { class: "bar thin", role: "img", ariaLabel: text }, cached ? known : null, computed), h("p", {}, `${text}. `, sentence));
}

/** The first token that no earlier prompt had, beside the one that was known there. */
function difference({ before, token, instead }) {
  if (!token) return null;
  const row = (name, text, kind) => h("p", {}, h("span", { class: "label" }, name), h("code", {}, `…${shown(before ?? "")}`, h("mark", { class: kind }, shown(text))));
  return h("div", { class: "difference" }, row("asked now", token, "new"), instead ? row("known before", instead, "old") : null);
}

const shown = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥");

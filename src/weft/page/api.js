// Talking to the server: every request carries the key where one is known, and asks for it when the server does.

import { find, memory } from "/page/dom.js";

let asking = null;

function headers(more) {
  const key = memory.get("key", "");
  return key ? { authorization: `Bearer ${key}`, ...more } : { ...more };
}

function askKey() {
  asking ??= new Promise((resolve) => {
    const dialog = find("ask-key");
    dialog.addEventListener("close", () => {
      memory.set("key", find("key").value.trim());
      asking = null;
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

/** A response that is fine. Throws an Error with the server's own words otherwise. */
export async function request(path, options = {}) {
  for (;;) {
    const response = await fetch(path, { ...options, headers: headers(options.headers) });
    if (response.ok) return response;
    if (response.status === 401) {
      await askKey();
      continue;
    }
    const body = await response.json().catch(() => null);
    throw new Error(body?.error?.message ?? `${response.status} ${response.statusText}`);
  }
}

export async function get(path) {
  return (await request(path)).json();
}

export async function post(path, body) {
  return (await request(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) })).json();
}

/** The events of a streamed response, each parsed. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

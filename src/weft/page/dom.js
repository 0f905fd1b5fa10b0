// Small words for the page's own elements. Whatever a model or a prompt says becomes a text node, never markup.

/** An element with properties, children (elements or texts) and listeners (`onclick` …). */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name === "dataset") Object.assign(element.dataset, value);
    else if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const find = (id) => document.getElementById(id);

const colours = new Map();

/** A colour of the style sheet, for canvases. Asking the browser for each stroke would cost more than drawing. */
export function colour(name) {
  if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return colours.get(name);
}

/** Light or dark has changed: look again. */
export const forgetColours = () => colours.clear();

/** A canvas ready to be drawn on at the screen's own resolution: its context, width and height in CSS pixels. */
export function prepared(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const scale = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

export function bytes(count) {
  if (count < 1e6) return `${Math.round(count / 1e3)} kB`;
  return count < 1e9 ? `${(count / 1e6).toFixed(count < 1e7 ? 1 : 0)} MB` : `${(count / 1e9).toFixed(1)} GB`;
}

export function seconds(value) {
  if (value < 0.0995) return `${(value * 1e3).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  return value < 100 ? `${value.toFixed(value < 10 ? 2 : 1)} s` : `${Math.round(value)} s`;
}

export const count = (value) => Math.round(value).toLocaleString("en");

/** What this browser remembers; a private window may refuse. */
export const memory = {
  get(name, otherwise) {
    try {
      return JSON.parse(localStorage.getItem(`weft.${name}`)) ?? otherwise;
    } catch {
      return otherwise;
    }
  },
  /** Whether it was kept. */
  set(name, value) {
    try {
      localStorage.setItem(`weft.${name}`, JSON.stringify(value));
      return true;
    } catch {
      return false; // full or forbidden: the page works on without
    }
  },
};

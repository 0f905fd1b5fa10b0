// Images for the next message: picked, pasted or dropped, checked and scaled here, and shown above the text field until they are sent.

import { bytes, find, h } from "/page/dom.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MAX_BYTES = 20_000_000; // of one file; the server takes no more either
const MAX_SIDE = 2048; // pixels; a larger picture is scaled down, so that requests stay small

let pending = []; // { name, url }, in the order in which they are sent
let reading = null; // resolves to whether all files became images; null: no file is being read
let blindness = () => ""; // a sentence saying why the chosen model reads no images; empty: it does
let redraw = (draw) => draw();

/** The images of the next message. */
export const attached = () => pending;

/** Wait for files that are still being read; false: one of them was refused while we waited. */
export const settled = async () => (await reading) ?? true;

/** Hand the images over to a message. */
export function takeAll() {
  const taken = pending;
  keep([]);
  return taken;
}

/** One sentence above the text field; none: take it away. */
export const say = (words = "") => (find("notice").textContent = words);

/** Images as thumbnails; with `remove` each has a button that calls it with its place. */
export function thumbnails(images, remove = null) {
  return images.map(({ name, url }, place) => {
    if (!url) return h("span", { class: "note" }, `${name}: not kept`);
    const picture = h("img", { src: url, alt: name });
    if (remove) return h("span", { class: "thumbnail" }, picture, h("button", { type: "button", ariaLabel: `Remove ${name}`, title: "Remove", onclick: () => remove(place) }, "×"));
    const button = h("button", { type: "button", class: "thumbnail", ariaLabel: `${name}, larger or smaller`, ariaExpanded: "false" }, picture);
    button.addEventListener("click", () => (button.ariaExpanded = String(button.classList.toggle("large"))));
    return button;
  });
}

// ---- files become images

/** Read files in their order; those that can not be sent are refused with a sentence. */
function add(files) {
  say();
  if (blindness()) return say(blindness());
  const before = reading;
  const mine = (async () => {
    const read = await Promise.allSettled(files.map(imageOf));
    const isWhole = (await before) ?? true;
    keep([...pending, ...read.filter((one) => one.value).map((one) => one.value)]);
    const refusals = read.filter((one) => one.reason).map((one) => one.reason.message);
    if (refusals.length) say(refusals.join(" "));
    if (reading === mine) reading = null;
    return isWhole && !refusals.length;
  })();
  reading = mine;
}

/** A file as a data URL, no longer than MAX_SIDE. Throws an Error with a sentence for the person who chose it. */
async function imageOf(file) {
  const name = file.name || "The image";
  if (!TYPES.includes(file.type)) throw new Error(`${name} is no PNG, JPEG, WebP or GIF image.`);
  if (file.size > MAX_BYTES) throw new Error(`${name} has more than the ${bytes(MAX_BYTES)} that an image may have.`);
  const bitmap = await createImageBitmap(file).catch(() => null);
  if (!bitmap) throw new Error(`${name} can not be read as an image.`);
  try {
    const scale = MAX_SIDE / Math.max(bitmap.width, bitmap.height);
    return { name, url: scale < 1 ? scaled(bitmap, scale, file.type) : await dataUrl(file) };
  } finally {
    bitmap.close();
  }
}

/** Photographs stay JPEG; all else becomes PNG, which loses nothing and may be transparent. */
function scaled(bitmap, scale, type) {
  const size = (pixels) => Math.max(1, Math.round(pixels * scale));
  const canvas = h("canvas", { width: size(bitmap.width), height: size(bitmap.height) });
  const pen = canvas.getContext("2d");
  pen.imageSmoothingQuality = "high";
  pen.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL(type === "image/jpeg" ? type : "image/png", 0.9);
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name || "The image"} can not be read: ${reader.error.message}`));
    reader.readAsDataURL(file);
  });
}

// ---- the tray above the text field

function keep(images) {
  pending = images;
  redraw(() => find("tray").replaceChildren(...thumbnails(pending, remove)));
}

function remove(place) {
  keep(pending.filter((_, other) => other !== place));
  (find("tray").querySelectorAll("button")[Math.min(place, pending.length - 1)] ?? find("draft")).focus();
}

// ---- beginning

/** The chosen model, or what is known of it, has changed. */
export function refresh() {
  find("attach").disabled = Boolean(blindness());
  find("attach").title = blindness() || "PNG, JPEG, WebP or GIF; also by pasting or dropping";
}

function pasted(event) {
  const { files, types } = event.clipboardData;
  // Office programs add a picture to the text they copy: there the text is meant.
  if (!files.length || (types.includes("text/plain") && types.includes("text/html"))) return;
  event.preventDefault();
  add([...files]);
}

function picked() {
  add([...find("files").files]);
  find("files").value = ""; // the same file may be picked again
  find("draft").focus();
}

function listenForDrops(area) {
  const show = (isOver) => area.classList.toggle("dropping", isOver);
  const holdsFiles = (event) => event.dataTransfer.types.includes("Files");
  area.addEventListener("dragover", (event) => {
    if (!holdsFiles(event)) return;
    event.preventDefault(); // else the browser would leave the page and show the file, whatever the model reads
    show(!blindness());
  });
  area.addEventListener("dragleave", (event) => area.contains(event.relatedTarget) || show(false));
  area.addEventListener("drop", (event) => {
    show(false);
    if (!holdsFiles(event)) return;
    event.preventDefault();
    add([...event.dataTransfer.files]);
  });
}

/** `whyBlind` gives a sentence where the chosen model reads no images; `around` is called with each change of the tray, and makes it. */
export function begin(whyBlind, around) {
  [blindness, redraw] = [whyBlind, around];
  find("files").accept = TYPES.join(",");
  find("files").addEventListener("change", picked);
  find("attach").addEventListener("click", () => find("files").click());
  find("composer").addEventListener("paste", pasted);
  listenForDrops(find("talk"));
  refresh();
}

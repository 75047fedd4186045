// Images that go with the next message: dropped on the page, pasted or chosen; shown until they are sent.

import { byId, make, toast } from "/ui/dom.js";

const MOST_BYTES = 20 * 1024 * 1024;
const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"];

let waiting = [];

/** Takes images from drops, pastes and the button beside the message field. */
export function startImages() {
  document.addEventListener("dragover", (event) => { if (hasFiles(event)) event.preventDefault(); });
  document.addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    addAll(event.dataTransfer.files);
  });
  byId("composer-text").addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (!files.length) return;
    event.preventDefault();
    addAll(files);
  });
  const chosen = byId("image-file");
  byId("attach").addEventListener("click", () => chosen.click());
  chosen.addEventListener("change", () => { addAll(chosen.files); chosen.value = ""; });
}

/** The images to send with a message; none wait any more. */
export function takeImages() {
  const taken = waiting;
  putImages([]);
  return taken;
}

/** Lets these images wait, in place of those that do. */
export function putImages(urls) {
  waiting = [...urls];
  draw();
}

/** Images of a message, as they are shown in it. */
export function thumbnails(urls) {
  return make("div", { class: "images" }, ...urls.map((url, i) => make("img", { src: url, alt: `Image ${i + 1}` })));
}

function hasFiles(event) {
  return event.dataTransfer?.types.includes("Files");
}

async function addAll(files) {
  for (const file of files) {
    if (!KINDS.includes(file.type)) toast(`${file.name}: PNG, JPEG, WebP and GIF are taken`);
    else if (file.size > MOST_BYTES) toast(`${file.name} is larger than 20 MiB`);
    else waiting.push(await read(file));
  }
  draw();
}

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}

function draw() {
  const place = byId("waiting-images");
  place.hidden = !waiting.length;
  place.replaceChildren(...waiting.map((url, i) => make("button", {
    type: "button", title: "Remove", "aria-label": `Remove image ${i + 1}`,
    onclick: () => { waiting.splice(i, 1); draw(); },
  }, make("img", { src: url, alt: "" }))));
}

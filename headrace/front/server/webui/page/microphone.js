// Speech for the message field: recorded by the browser, written down by the server, then the user's to send.

import { transcribe } from "/ui/api.js";
import { byId, notice, toast } from "/ui/dom.js";

let recorder = null;

/** Wires the button up; `currentModel` gives the chosen model's name. */
export function startMicrophone(currentModel) {
  const button = byId("record");
  button.hidden = !(navigator.mediaDevices?.getUserMedia && window.MediaRecorder);
  button.addEventListener("click", () => (recorder ? recorder.stop() : record(currentModel())));
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") discard(); });
}

async function record(model) {
  let stream;
  try {
    stream = await navigator.mediaDevices.getUserMedia({ audio: true });
  } catch (error) {
    toast(`No microphone: ${error.message}`);
    return;
  }
  const parts = [];
  recorder = new MediaRecorder(stream);
  recorder.addEventListener("dataavailable", ({ data }) => parts.push(data));
  recorder.addEventListener("stop", (event) => {
    const wanted = recorder === event.target;
    stream.getTracks().forEach((track) => track.stop());
    recorder = null;
    draw();
    if (wanted) write(new Blob(parts, { type: event.target.mimeType }), model);
  });
  recorder.start();
  draw();
}

/** Ends a recording that nobody wants. */
function discard() {
  const going = recorder;
  recorder = null;
  going?.stop();
}

async function write(sound, model) {
  const button = byId("record");
  button.disabled = true;
  try {
    const text = await transcribe(sound, model);
    const field = byId("composer-text");
    field.value = [field.value.trim(), text.trim()].filter(Boolean).join(" ");
    field.dispatchEvent(new Event("input"));
    field.focus();
    if (!text.trim()) toast("Nothing was heard");
  } catch (error) {
    if (error.status === 401) notice("This server asks for an API key: use the key button above.");
    toast(error.message);
  } finally {
    button.disabled = false;
  }
}

function draw() {
  const button = byId("record");
  button.setAttribute("aria-pressed", String(Boolean(recorder)));
  button.title = recorder ? "Stop recording" : "Record speech";
  button.setAttribute("aria-label", button.title);
}

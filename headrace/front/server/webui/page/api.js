// Calls to this server: JSON, and server-sent events read as they come.

const KEY = "headrace.key";

export const key = () => sessionStorage.getItem(KEY) ?? "";

export function setKey(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

/** What the server refused, in its words. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headers(more = {}) {
  return key() ? { ...more, authorization: `Bearer ${key()}` } : more;
}

async function refusal(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error?.message ?? message;
  } catch { /* not JSON: the status has to do */ }
  return new Refused(response.status, message);
}

export async function getJson(path) {
  const response = await fetch(path, { headers: headers() });
  if (!response.ok) throw await refusal(response);
  return response.json();
}

export async function getText(path) {
  const response = await fetch(path, { headers: headers() });
  if (!response.ok) throw await refusal(response);
  return response.text();
}

/** The chunks of a streamed chat completion, each a parsed object. An error event ends it by an exception. */
export async function* chatStream(body, signal) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: headers({ "content-type": "application/json" }),
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw await refusal(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const events = held.split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (!data) continue;
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refused(chunk.error.code ?? 500, chunk.error.message);
      yield chunk;
    }
  }
}

/** What is said in a recording. */
export async function transcribe(sound, model) {
  const body = new FormData();
  body.append("file", sound, "speech");
  body.append("model", model);
  const response = await fetch("/v1/audio/transcriptions", { method: "POST", headers: headers(), body });
  if (!response.ok) throw await refusal(response);
  return (await response.json()).text;
}

/** Prometheus text -> Map from series name to a list of {labels, value}. */
export function parseMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!match) continue;
    const labels = Object.fromEntries([...(match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map((m) => [m[1], m[2]]));
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push({ labels, value: Number(match[3]) });
  }
  return found;
}

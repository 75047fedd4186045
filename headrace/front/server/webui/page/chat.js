// The playground: a conversation with streaming, reasoning that folds, tool calls that can be answered.

import { chatStream, key } from "/ui/api.js";
import { byId, copy, icon, make, notice, toast } from "/ui/dom.js";
import { putImages, startImages, takeImages, thumbnails } from "/ui/images.js";
import { markdown } from "/ui/markdown.js";
import { startMicrophone } from "/ui/microphone.js";

const STORE = "headrace.chat";
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const SETTINGS = ["system", ...NUMBERS, "thinking", "tools"];

let messages = [];
let running = null;
let model = () => "";

/** Wires the page up; `currentModel` gives the chosen model's name. */
export function startChat(currentModel) {
  model = currentModel;
  restore();
  startImages();
  startMicrophone(currentModel);
  byId("composer").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
  byId("stop").addEventListener("click", stop);
  byId("new-chat").addEventListener("click", newChat);
  byId("copy-curl").addEventListener("click", () => copy(asCurl(), "curl command"));
  byId("copy-python").addEventListener("click", () => copy(asPython(), "Python code"));
  const field = byId("composer-text");
  field.addEventListener("input", () => grow(field));
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running) stop();
    if (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); newChat(); }
  });
  for (const name of SETTINGS) byId(name).addEventListener("change", store);
  if (matchMedia("(max-width: 820px)").matches) byId("panel").open = false;
  drawAll();
}

function grow(field) {
  field.rows = Math.min(10, Math.max(1, field.value.split("\n").length));
}

function newChat() {
  stop();
  messages = [];
  store();
  drawAll();
  byId("composer-text").focus();
}

function stop() {
  running?.abort();
}

function submit() {
  const field = byId("composer-text");
  const text = field.value.trim();
  if (running) return;
  const images = takeImages();
  if (!text && !images.length) return;
  field.value = "";
  grow(field);
  messages.push({ role: "user", content: text, ...(images.length ? { images } : {}) });
  answer();
}

// requests

/** The request for the next answer; null if the tools field is not JSON. */
function request() {
  const body = { model: model(), messages: [] };
  const system = byId("system").value.trim();
  if (system) body.messages.push({ role: "system", content: system });
  body.messages.push(...messages.filter((m) => !m.failed).map(sent));
  for (const name of NUMBERS) {
    const value = byId(name).value;
    if (value !== "") body[name] = Number(value);
  }
  const thinking = byId("thinking").value;
  if (thinking) body.chat_template_kwargs = { enable_thinking: thinking === "on" };
  const tools = toolList();
  if (tools === null) return null;
  if (tools.length) body.tools = tools;
  return body;
}

/** A message as the API takes it: what is shown of reasoning and timing stays here. */
function sent(message) {
  if (message.role === "tool") return { role: "tool", tool_call_id: message.tool_call_id, content: message.content };
  const plain = { role: message.role, content: message.images ? withImages(message) : message.content };
  if (message.tool_calls?.length) plain.tool_calls = message.tool_calls;
  return plain;
}

function withImages({ images, content }) {
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return content ? [...parts, { type: "text", text: content }] : parts;
}

function toolList() {
  const text = byId("tools").value.trim();
  byId("tools-error").textContent = "";
  if (!text) return [];
  try {
    const parsed = JSON.parse(text);
    if (Array.isArray(parsed)) return parsed;
    throw new Error("a list is expected");
  } catch (error) {
    byId("tools-error").textContent = `Not a JSON list: ${error.message}`;
    byId("panel").open = true;
    return null;
  }
}

async function answer() {
  const body = request();
  if (body === null) return;
  const message = { role: "assistant", content: "", reasoning: "", tool_calls: [], began: performance.now() };
  messages.push(message);
  running = new AbortController();
  busy(true);
  drawAll();
  const view = byId("log").lastElementChild;
  let frame = 0;
  const redraw = () => { frame = 0; drawInto(view, message, messages.length - 1); keepAtEnd(); };
  try {
    for await (const chunk of chatStream(body, running.signal)) {
      take(message, chunk);
      frame ||= requestAnimationFrame(redraw);
    }
    notice("");
  } catch (error) {
    failed(message, error);
  } finally {
    cancelAnimationFrame(frame);
    running = null;
    message.seconds = (performance.now() - message.began) / 1000;
    busy(false);
    drawAll();
    store();
    byId("composer-text").focus({ preventScroll: true });
  }
}

function failed(message, error) {
  if (error.name === "AbortError") message.stopped = true;
  else {
    message.failed = !message.content;
    message.error = error.message;
    if (error.status === 401) notice("This server asks for an API key: use the key button above.");
  }
}

/** Folds one chunk into the message. */
function take(message, chunk) {
  const choice = chunk.choices?.[0];
  if (chunk.usage) message.usage = chunk.usage;
  if (!choice) return;
  const delta = choice.delta ?? {};
  if (message.first === undefined && (delta.content || delta.reasoning || delta.tool_calls)) message.first = performance.now() - message.began;
  if (delta.reasoning) message.reasoning += delta.reasoning;
  if (delta.content) {
    if (message.reasoning && message.thought === undefined) message.thought = (performance.now() - message.began) / 1000;
    message.content += delta.content;
  }
  for (const part of delta.tool_calls ?? []) {
    const call = (message.tool_calls[part.index] ??= { id: part.id, type: "function", function: { name: "", arguments: "" } });
    call.function.name += part.function?.name ?? "";
    call.function.arguments += part.function?.arguments ?? "";
  }
  if (choice.finish_reason) message.finish = choice.finish_reason;
}

// drawing

function busy(on) {
  byId("stop").hidden = !on;
  byId("send").hidden = on;
  byId("log").setAttribute("aria-busy", String(on));
}

function keepAtEnd() {
  const log = byId("log");
  if (log.scrollHeight - log.scrollTop - log.clientHeight < 160) log.scrollTop = log.scrollHeight;
}

function drawAll() {
  const log = byId("log");
  if (!messages.length) {
    log.replaceChildren(make("div", { class: "empty" },
      make("img", { src: "/ui/icon.svg", alt: "", width: 56, height: 56 }),
      make("p", { class: "title" }, "What would you like to ask?"),
      ...["What is 17 + 25?", "Tell me a short story.", "Sort these: pear, apple, fig."].map((text) =>
        make("button", { type: "button", onclick: () => { byId("composer-text").value = text; submit(); } }, text))));
    return;
  }
  log.replaceChildren(...messages.map((message, i) => drawInto(make("article"), message, i)));
  log.scrollTop = log.scrollHeight;
}

function drawInto(view, message, index) {
  const open = view.querySelector(".reasoning")?.open;
  view.className = `message ${message.role}`;
  view.setAttribute("aria-label", { user: "You", assistant: "Model", tool: "Tool result" }[message.role]);
  view.replaceChildren(...parts(message, index, open));
  return view;
}

function parts(message, index, open) {
  const made = [];
  if (message.reasoning) made.push(reasoning(message, open));
  if (message.role === "assistant") made.push(make("div", { class: "body" }, ...markdown(message.content)));
  else made.push(...(message.images ? [thumbnails(message.images)] : []), make("div", { class: "body plain" }, message.content));
  for (const call of message.tool_calls ?? []) made.push(toolCall(call, index));
  if (message.error) made.push(make("p", { class: "error", role: "alert" }, message.error));
  const underWay = running && message === messages.at(-1);
  if (!underWay) made.push(actions(message, index));
  else if (!message.content && !message.reasoning) made.push(make("span", { class: "dots", role: "img", "aria-label": "Waiting" }));
  return made;
}

function reasoning(message, open) {
  const over = message.thought !== undefined || message.seconds !== undefined;
  const seconds = message.thought ?? message.seconds;
  const title = over ? `Thought for ${seconds.toFixed(1)} s` : "Thinking";
  return make("details", { class: "reasoning", open: open ?? false },
    make("summary", {}, title), make("div", { class: "body" }, ...markdown(message.reasoning)));
}

function toolCall(call, index) {
  let shown = call.function.arguments;
  try { shown = JSON.stringify(JSON.parse(shown), null, 2); } catch { /* still on its way */ }
  const view = make("div", { class: "call" }, make("strong", {}, call.function.name || "tool"), make("pre", { tabIndex: 0 }, shown));
  const answered = messages.some((m) => m.role === "tool" && m.tool_call_id === call.id);
  if (answered || running) return view;
  const field = make("textarea", { rows: 1, placeholder: "Result", "aria-label": `Result of ${call.function.name}` });
  view.append(make("div", { class: "row" }, field, make("button", { type: "button", onclick: () => giveResult(call, field.value, index) }, "Give result")));
  return view;
}

/** Once every call of the message has its result, the model goes on. */
function giveResult(call, content, index) {
  messages.push({ role: "tool", tool_call_id: call.id, content });
  const known = new Set(messages.filter((m) => m.role === "tool").map((m) => m.tool_call_id));
  if (messages[index].tool_calls.every((each) => known.has(each.id))) answer();
  else drawAll();
}

function actions(message, index) {
  const row = make("div", { class: "actions" });
  const add = (symbol, label, act) => row.append(make("button", { type: "button", title: label, "aria-label": label, onclick: act }, icon(symbol)));
  if (message.content) add("copy", "Copy", () => copy(message.content, "Text"));
  if (message.role === "user" && !running) add("edit", "Edit", () => edit(index));
  if (message.role === "assistant" && !running) add("again", "Answer again", () => { messages.length = index; answer(); });
  const told = summary(message);
  if (told) row.append(make("span", { class: "quiet" }, told));
  return row;
}

function summary(message) {
  const told = [];
  if (message.stopped) told.push("stopped");
  else if (message.finish === "length") told.push("cut at the token limit");
  const out = message.usage?.completion_tokens;
  if (message.first !== undefined) told.push(`first token ${Math.round(message.first)} ms`);
  if (out && message.seconds !== undefined) {
    const decode = message.seconds - (message.first ?? 0) / 1000;
    const streamed = decode > 0.05; // an answer that came in one piece tells no rate
    told.push(`${out} tokens`, ...(out > 1 && streamed ? [`${((out - 1) / decode).toFixed(0)} tok/s`] : []));
  }
  const cached = message.usage?.prompt_tokens_details?.cached_tokens;
  if (cached) told.push(`${cached} of ${message.usage.prompt_tokens} prompt tokens cached`);
  return told.join(" · ");
}

function edit(index) {
  const field = byId("composer-text");
  field.value = messages[index].content;
  putImages(messages[index].images ?? []);
  messages.length = index;
  drawAll();
  grow(field);
  field.focus();
}

// keeping and sharing

function store() {
  const settings = Object.fromEntries(SETTINGS.map((name) => [name, byId(name).value]));
  try {
    sessionStorage.setItem(STORE, JSON.stringify({ messages, settings }));
  } catch {
    toast("This conversation is too long to be kept in the tab");
  }
}

function restore() {
  try {
    const kept = JSON.parse(sessionStorage.getItem(STORE) ?? "{}");
    messages = kept.messages ?? [];
    for (const [name, value] of Object.entries(kept.settings ?? {})) if (SETTINGS.includes(name)) byId(name).value = value;
  } catch { /* what cannot be read is forgotten */ }
}

function asCurl() {
  const body = JSON.stringify(request() ?? {}, null, 2).replaceAll("'", "'\\''");
  const auth = key() ? ` \\\n  -H "Authorization: Bearer $HEADRACE_API_KEY"` : "";
  return `curl ${location.origin}/v1/chat/completions${auth} \\\n  -H 'Content-Type: application/json' \\\n  -d '${body}'\n`;
}

function asPython() {
  const { chat_template_kwargs: extra, top_k: topK, ...body } = request() ?? {};
  const more = { ...(extra ? { chat_template_kwargs: extra } : {}), ...(topK === undefined ? {} : { top_k: topK }) };
  const entries = Object.entries(body).map(([name, value]) => `    ${name}=${literal(value)},`);
  if (Object.keys(more).length) entries.push(`    extra_body=${literal(more)},`);
  const secret = key() ? 'os.environ["HEADRACE_API_KEY"]' : '"none"';
  return `${key() ? "import os\n\n" : ""}from openai import OpenAI\n\nclient = OpenAI(base_url="${location.origin}/v1", api_key=${secret})\nanswer = client.chat.completions.create(\n${entries.join("\n")}\n)\nprint(answer.choices[0].message.content)\n`;
}

/** A value as Python writes it. */
function literal(value) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([k, v]) => `${JSON.stringify(k)}: ${literal(v)}`).join(", ")}}`;
  return JSON.stringify(value);
}

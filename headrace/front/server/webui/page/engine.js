// The live view: what the engine holds and does, asked once a second while it is looked at.

import { getJson, getText, parseMetrics } from "/ui/api.js";
import { byId, make, notice } from "/ui/dom.js";

const KEPT = 120;
const history = { rate: [], running: [], waiting: [] };
let timer = 0;
let last = null;

export function showEngine(on) {
  clearInterval(timer);
  if (!on) return;
  tick();
  timer = setInterval(tick, 1000);
}

async function tick() {
  if (document.hidden) return;
  try {
    const [ledger, text] = await Promise.all([getJson("/v1/requests"), getText("/metrics")]);
    draw(total(ledger.engines), parseMetrics(text), ledger.process);
    notice("");
  } catch (error) {
    notice(error.status === 401 ? "This server asks for an API key: use the key button above." : `No answer from the server: ${error.message}`);
  }
}

/** The figures of all engine cores added up. */
function total(engines) {
  const sum = {};
  for (const engine of engines) {
    for (const [name, value] of Object.entries(engine)) {
      if (typeof value === "number") sum[name] = (sum[name] ?? 0) + value;
      else if (value && typeof value === "object") sum[name] = merged(sum[name] ?? {}, value);
      else sum[name] ??= value;
    }
  }
  return sum;
}

function merged(one, other) {
  const both = { ...one };
  for (const [name, value] of Object.entries(other)) both[name] = typeof value === "number" ? (both[name] ?? 0) + value : value;
  return both;
}

function draw(engine, metrics, process) {
  const now = performance.now();
  const rate = last ? Math.max(0, (engine.output_tokens - last.tokens) / ((now - last.at) / 1000)) : 0;
  last = { at: now, tokens: engine.output_tokens };
  keep(history.rate, rate);
  keep(history.running, engine.running);
  keep(history.waiting, engine.waiting);
  const hits = engine.prefix_query_tokens ? engine.prefix_hit_tokens / engine.prefix_query_tokens : 0;
  tiles([
    ["Running", `${engine.running} of ${engine.total_rows}`],
    ["Waiting", String(engine.waiting)],
    ["Output", `${rate.toFixed(0)} tok/s`],
    ["Prefix cache", `${(100 * hits).toFixed(0)} % hits`],
    ["Preemptions", String(engine.preemptions ?? 0)],
    ["State", engine.draining ? "draining" : engine.paused ? `paused: ${engine.paused}` : "serving"],
    ["Open requests", String(process?.generations ?? 0)],
  ]);
  lines("rate", [[history.rate, "--accent"]]);
  lines("batch", [[history.running, "--accent"], [history.waiting, "--warm"]]);
  blocks(engine);
  queue(engine);
  histogram("ttft", metrics.get("headrace_time_to_first_token_seconds_bucket"));
  histogram("itl", metrics.get("headrace_inter_token_latency_seconds_bucket"));
  ended(engine);
  speculation(engine);
}

function keep(list, value) {
  list.push(value);
  if (list.length > KEPT) list.shift();
}

function tiles(entries) {
  byId("tiles").replaceChildren(...entries.map(([name, value]) =>
    make("div", { class: "tile" }, make("span", { class: "quiet" }, name), make("strong", {}, value))));
}

/** Areas on a shared scale, newest at the right, with a grid line at round values. */
function lines(id, series) {
  const canvas = byId(id);
  const ratio = devicePixelRatio || 1;
  const [width, height, left] = [canvas.clientWidth, 150, 34];
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const style = getComputedStyle(document.documentElement);
  const [floor, top] = [height - 6, 10];
  const most = niceTop(Math.max(1, ...series.flatMap(([values]) => values)));
  const y = (value) => floor - (value / most) * (floor - top);
  pen.font = "11px system-ui";
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  for (const value of [0, most / 2, most]) {
    pen.fillStyle = style.getPropertyValue("--quiet");
    pen.fillText(Number.isInteger(value) ? String(value) : "", left - 6, y(value));
    pen.fillStyle = style.getPropertyValue("--line");
    pen.fillRect(left, Math.round(y(value)), width - left, 1);
  }
  for (const [values, colour] of series) {
    const x = (i) => width - (values.length - 1 - i) * ((width - left) / (KEPT - 1));
    pen.strokeStyle = pen.fillStyle = style.getPropertyValue(colour);
    pen.lineWidth = 2;
    pen.lineJoin = "round";
    pen.beginPath();
    values.forEach((value, i) => pen.lineTo(x(i), y(value)));
    pen.stroke();
    pen.lineTo(width, floor);
    pen.lineTo(x(0), floor);
    pen.globalAlpha = 0.12;
    pen.fill();
    pen.globalAlpha = 1;
  }
}

/** The least of 1, 2, 4, 5 or 10 times a power of ten that is not below a value, from 2 on. */
function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(2, value)));
  return power * [1, 2, 4, 5, 10].find((step) => Math.max(2, value) <= step * power);
}

function bar(parts, whole) {
  return make("div", { class: "bar" }, ...parts.map(([kind, value]) => {
    const part = make("span", { class: kind });
    part.style.width = `${whole ? (100 * value) / whole : 0}%`;
    return part;
  }));
}

function legend(entries) {
  return make("dl", { class: "legend" }, ...entries.flatMap(([kind, name, value]) =>
    [make("dt", { class: kind }, name), make("dd", {}, value)]));
}

function blocks(engine) {
  const { held_blocks: held, cached_blocks: cached, total_blocks: all } = engine;
  byId("blocks").replaceChildren(bar([["held", held], ["cached", cached]], all), legend([
    ["held", "in use", String(held)],
    ["cached", "kept for prompts that repeat", String(cached)],
    ["free", "free", String(all - held - cached)],
  ]));
}

function rows(entries, none) {
  if (!entries.length) return [make("p", { class: "quiet" }, none)];
  const most = Math.max(...entries.map(([, value]) => value));
  return entries.sort((a, b) => b[1] - a[1]).map(([name, value]) =>
    make("div", { class: "count" }, make("span", {}, name), bar([["held", value]], most), make("span", {}, String(value))));
}

function queue(engine) {
  const reasons = rows(Object.entries(engine.waiting_by_reason ?? {}), "No request is waiting.");
  const tenants = Object.entries(engine.waiting_by_tenant ?? {});
  byId("queue").replaceChildren(...reasons, ...(tenants.length ? [make("h3", {}, "By tenant"), ...rows(tenants, "")] : []));
}

function ended(engine) {
  byId("ended").replaceChildren(...rows(Object.entries(engine.finished ?? {}), "None yet."));
}

function speculation(engine) {
  const drafted = engine.draft_tokens ?? 0;
  byId("speculation-card").hidden = !drafted;
  if (drafted) byId("speculation").replaceChildren(bar([["held", engine.accepted_tokens]], drafted), legend([["held", "accepted", `${engine.accepted_tokens} of ${drafted}`]]));
}

/** Buckets of a Prometheus histogram as bars; the bounds are cumulative there. */
function histogram(id, buckets) {
  const place = byId(id);
  const sums = new Map();
  for (const { labels, value } of buckets ?? []) sums.set(labels.le, (sums.get(labels.le) ?? 0) + value);
  const bounds = [...sums.entries()].map(([le, value]) => [le === "+Inf" ? Infinity : Number(le), value]).sort((a, b) => a[0] - b[0]);
  const counts = bounds.map(([le, value], i) => [le, value - (i ? bounds[i - 1][1] : 0)]);
  const all = bounds.at(-1)?.[1] ?? 0;
  if (!all) return place.replaceChildren(make("p", { class: "quiet" }, "Nothing measured yet."));
  const most = Math.max(...counts.map(([, value]) => value));
  place.replaceChildren(...counts.filter(([, value], i) => value || (i && counts[i - 1][1]) || counts[i + 1]?.[1]).map(([le, value]) =>
    make("div", { class: "count" }, make("span", {}, le === Infinity ? "more" : `≤ ${duration(le)}`), bar([["held", value]], most), make("span", {}, String(value)))));
}

const duration = (seconds) => (seconds < 1 ? `${+(1000 * seconds).toFixed(1)} ms` : `${seconds} s`);

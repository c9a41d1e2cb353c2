// Rates over the last seconds, with a mark wherever the policy changed, and latencies.

import { canvasOf, ink } from "./batch.js";
import { $, call, keyWanted } from "./server.js";

const WINDOW = 90; // seconds that the two lines show at most
const SHORTEST = 20; // and at least

export const history = []; // { t, rate, progress }
const switches = []; // { t, policy }: when another policy came into force
let before = null; // the snapshot rates are taken against
let policy = null; // of the last snapshot
const steps = []; // { t, seconds } of decode steps

// Take in a snapshot.
export function take(now) {
  if (policy !== null && now.policy !== policy) switches.push({ t: now.time, policy: now.policy });
  policy = now.policy;
  const counts = now.counters;
  if (counts.emitted === undefined) return; // nothing was counted yet
  if (before && (now.time < before.time || counts.emitted < before.counters.emitted)) before = null; // a new engine
  if (before && now.time - before.time > 2) { // the engine was idle, it reports nothing then
    history.push({ t: before.time + 0.5, rate: 0, progress: null }, { t: now.time, rate: 0, progress: null });
    before = now;
  } else if (before && now.time - before.time >= 0.45) {
    const took = counts.request_steps - before.counters.request_steps;
    const gained = counts.emitted - before.counters.emitted;
    history.push({ t: now.time, rate: gained / (now.time - before.time), progress: took > 0 ? gained / took : null });
    before = now;
  }
  before ??= now;
  for (const seconds of now.step_seconds) steps.push({ t: now.time, seconds });
  while (history[0]?.t < now.time - WINDOW) history.shift();
  while (switches[0]?.t < now.time - WINDOW) switches.shift();
  while (steps[0]?.t < now.time - 60) steps.shift();
}

function drawMarks(pen, x, width, height) {
  pen.strokeStyle = ink("ink-trimmed");
  pen.fillStyle = ink("batch-size");
  pen.font = "10px system-ui, sans-serif";
  pen.setLineDash([2, 2]);
  let free = width; // from here on to the right is taken; the newest mark is labelled first
  for (const { t, policy: name } of switches.toReversed()) {
    pen.beginPath();
    pen.moveTo(x(t), 0);
    pen.lineTo(x(t), height);
    pen.stroke();
    const room = pen.measureText(name).width;
    const right = x(t) + 3 + room <= free;
    if (right) pen.fillText(name, x(t) + 3, 9);
    else if (free === width) pen.fillText(name, x(t) - room - 3, 9);
    free = right ? x(t) - 3 : Math.min(free, x(t) - (free === width ? room + 6 : 3));
  }
  pen.setLineDash([]);
}

// The line of one number of the points in history, on the canvas of this id.
export function drawLine(id, now, of) {
  const { canvas, pen, width, height } = canvasOf(id);
  const span = Math.max(now - (history[0]?.t ?? now), SHORTEST);
  const x = (t) => width - ((now - t) / span) * width;
  const top = Math.max(...history.map((point) => of(point) ?? 0), 1e-9) * 1.1;
  const y = (value) => height - 1 - (value / top) * (height - 14);
  drawMarks(pen, x, width, height);
  pen.strokeStyle = getComputedStyle(canvas).color;
  pen.lineWidth = 1.5;
  pen.lineJoin = "round";
  pen.beginPath();
  let down = false;
  for (const point of history) {
    const value = of(point);
    if (value !== null) pen[down ? "lineTo" : "moveTo"](x(point.t), y(value));
    down = value !== null;
  }
  pen.stroke();
}

function quantile(sorted, share) {
  return sorted.length ? sorted[Math.min(Math.floor(share * sorted.length), sorted.length - 1)] : null;
}

// Request latencies come from the server's histograms: what was added within the last minute, interpolated in its bucket.
const SERIES = {
  "vllm:time_to_first_token_seconds": "first token",
  "vllm:inter_token_latency_seconds": "inter-token",
  "vllm:e2e_request_latency_seconds": "whole request",
};
const scrapes = []; // { t, buckets: { series: [[le, count], …] } }

let kept = true; // whether the server keeps metrics

export async function scrape() {
  if (!kept || keyWanted()) return;
  let text;
  try {
    text = await (await call("metrics")).text();
  } catch {
    kept = keyWanted();
    return;
  }
  const buckets = {};
  for (const [, name, le, value] of text.matchAll(/^([\w:]+)_bucket\{[^}]*le="([^"]+)"[^}]*\} (\S+)$/gm)) {
    if (name in SERIES) (buckets[name] ??= []).push([le === "+Inf" ? Infinity : Number(le), Number(value)]);
  }
  scrapes.push({ t: performance.now(), buckets });
  while (scrapes.length > 2 && scrapes[1].t < performance.now() - 60000) scrapes.shift();
}

function fromBuckets(name, share) {
  const late = scrapes.at(-1)?.buckets[name];
  if (!late) return null;
  const early = scrapes[0] === scrapes.at(-1) ? null : scrapes[0].buckets[name];
  const counts = late.map(([le, count], i) => [le, count - (early?.[i]?.[1] ?? 0)]);
  const total = counts.at(-1)[1];
  if (!total) return null;
  const at = counts.findIndex(([, count]) => count >= share * total);
  const [low, below] = at > 0 ? counts[at - 1] : [0, 0];
  if (counts[at][0] === Infinity) return low;
  return low + ((counts[at][0] - low) * (share * total - below)) / (counts[at][1] - below);
}

export function drawLatency() {
  const sorted = steps.map((step) => step.seconds).sort((a, b) => a - b);
  const rows = [["decode step", (share) => quantile(sorted, share)]];
  for (const [name, title] of Object.entries(SERIES)) rows.push([title, (share) => fromBuckets(name, share)]);
  const shown = (seconds) => {
    if (seconds === null) return "–";
    return seconds >= 10 ? `${seconds.toFixed(1)} s` : (seconds * 1000).toFixed(seconds < 0.1 ? 1 : 0);
  };
  $("latency").replaceChildren(...rows.map(([title, of]) => {
    const row = document.createElement("tr");
    const head = document.createElement("th");
    head.scope = "row";
    head.textContent = title;
    row.append(head, ...[0.5, 0.95, 0.99].map((share) => {
      const data = document.createElement("td");
      data.textContent = shown(of(share));
      return data;
    }));
    return row;
  }));
}

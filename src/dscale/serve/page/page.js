// The page of `dscale serve`: a chat whose accepted drafts can be seen, and the engine's batch while it decodes.

import { drawStrip } from "./batch.js";
import { useModel } from "./chat.js";
import { $, call, events, keyGiven, keyWanted } from "./server.js";
import { drawLatency, drawLine, history, scrape, take } from "./speed.js";

let latest = null; // snapshot
let policy = null; // in force
let scheduled = false;
function draw() {
  scheduled = false;
  if (!latest) return;
  const now = latest;
  drawStrip(now.running ? now.lanes : []);
  drawLine("rate-line", now.time, (point) => point.rate);
  drawLine("progress-line", now.time, (point) => point.progress);
  const point = history.at(-1);
  $("rate").textContent = point ? point.rate.toFixed(point.rate < 100 ? 1 : 0) : "–";
  $("progress").textContent = point?.progress ? point.progress.toFixed(2) : "–";
  $("budget").textContent = Number(now.budget).toFixed(1);
  $("running").textContent = now.running;
  $("waiting").textContent = now.waiting;
  $("cache").textContent = now.pages ? `${((100 * now.pages_used) / now.pages).toFixed(0)}%` : "–";
}

function redraw() {
  if (!scheduled) requestAnimationFrame(draw);
  scheduled = true;
}

// Who serves: its name, and which policies it can take.
async function introduce() {
  let about;
  try {
    about = await (await call("dscale/about")).json();
  } catch {
    return; // following says what is wrong
  }
  const name = about.served?.[0] ?? about.model;
  useModel(name);
  $("model").textContent = [name, about.device, about.dtype].filter(Boolean).join(" · ");
  if (about.width) $("slots").max = about.width;
  for (const option of $("policy").options) {
    option.disabled = (about.drafter === false && !/^(off|auto)/.test(option.value)) ||
      (about.predictor === false && option.value.startsWith("dvl"));
  }
}

function connection(state, text) {
  if ($("connection").textContent === text) return;
  $("connection").className = `connection ${state}`;
  $("connection").textContent = text;
}

async function follow() {
  for (let wait = 1; ; wait = Math.min(wait * 2, 15)) {
    try {
      for await (const snapshot of events(await call("dscale/live"))) {
        if (!snapshot.counters) continue;
        connection("live", "live");
        wait = 1;
        take(snapshot);
        if (snapshot.policy !== policy) showPolicy(snapshot.policy);
        latest = snapshot;
        redraw();
      }
    } catch { /* said below */ }
    latest = null;
    drawStrip([]); // what was last heard is not the batch any more
    connection("lost", keyWanted() ? "API key needed" : "not connected");
    await (keyWanted() ? keyGiven().then(introduce) : new Promise((resolve) => setTimeout(resolve, wait * 1000)));
  }
}

function showPolicy(name) {
  policy = name;
  const select = $("policy");
  if (![...select.options].some((option) => option.value === name)) select.add(new Option(name, name));
  if (document.activeElement !== select) select.value = name;
  policyFields();
}

function policyFields() {
  $("slots-label").hidden = !/^(dvl|confidence)/.test($("policy").value);
}

$("policy").addEventListener("change", policyFields);
$("policy-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const wanted = { policy: $("policy").value };
  if (!$("slots-label").hidden) wanted.slots = Number($("slots").value);
  const status = $("policy-status");
  status.className = "muted";
  try {
    const answer = await (await call("dscale/policy", { method: "POST", body: JSON.stringify(wanted) })).json();
    status.textContent = `${answer.policy ?? wanted.policy} is in force`;
  } catch (error) {
    status.className = "muted bad";
    status.textContent = error.message;
    if (policy) $("policy").value = policy;
    policyFields();
  }
});

const THEMES = ["auto", "light", "dark"];
function setTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  $("theme").textContent = `Theme: ${name}`;
  localStorage.setItem("dscale-theme", name);
  redraw();
}
$("theme").addEventListener("click", () => {
  setTheme(THEMES[(THEMES.indexOf(localStorage.getItem("dscale-theme") ?? "auto") + 1) % 3]);
});

setTheme(localStorage.getItem("dscale-theme") ?? "auto");
policyFields();
drawLatency();
addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
introduce();
follow();
scrape();
setInterval(async () => {
  if (document.hidden) return;
  await scrape();
  drawLatency();
}, 2000);

// The chat: one streamed answer at a time, cut into the decode steps that made it.

import { $, call, events } from "./server.js";

const TINTS = 5;

let model = "";

// The model that answers.
export function useModel(name) {
  model = name;
}

let conversation = [];
let running = null; // AbortController of the answer being streamed

class Answer {
  // One streamed answer. With the server's step records its text is cut into tokens, else it is plain.
  constructor() {
    this.element = addMessage("assistant", model || "Model");
    this.element.classList.add("streaming");
    this.body = this.element.querySelector(".text");
    this.body.tabIndex = 0;
    this.body.setAttribute("role", "group");
    this.body.setAttribute("aria-label", "Answer. Left and right arrow keys walk through its decode steps.");
    this.text = "";
    this.steps = [];
    this.pending = []; // tokens whose text has not been released yet
    this.began = performance.now();
    this.first = null;
    this.tokens = 0;
    this.spoken = 0;
    this.spokeAt = this.began;
  }

  add(content, detail) {
    if (detail) this.queue(detail);
    if (!content) return;
    this.first ??= performance.now();
    this.text += content;
    const held = this.pending.map((token) => token.text).join("");
    if (!this.steps.length) this.body.append(content);
    else if (held.startsWith(content)) this.release(content);
    else { // the tokens' own texts do not add up (a character of several tokens): tint the piece as a whole
      const last = this.pending.at(-1) ?? { step: this.steps.length - 1, draft: false };
      this.pending = [];
      this.put({ ...last, text: content });
    }
    this.speak(false);
  }

  queue({ steps = [], token_texts: texts = [] }) {
    let next = 0;
    for (const step of steps) {
      this.steps.push(step);
      for (let i = 0; i < step.emitted; i++) {
        this.pending.push({ text: texts[next++] ?? "", step: this.steps.length - 1, draft: i < step.accepted });
      }
    }
    this.tokens += next;
  }

  release(content) {
    let left = content.length;
    while (left > 0) {
      const token = this.pending[0];
      this.put({ ...token, text: token.text.slice(0, left) });
      const taken = Math.min(left, token.text.length);
      token.text = token.text.slice(taken);
      left -= taken;
      if (!token.text) this.pending.shift();
    }
  }

  put({ text, step, draft }) {
    if (!text) return;
    let group = this.body.lastElementChild;
    if (group?.dataset.step !== String(step)) {
      group = document.createElement("span");
      group.className = `step s${step % TINTS}`;
      group.dataset.step = step;
      this.body.append(group);
    }
    const token = document.createElement(draft ? "b" : "span");
    const blank = draft && !group.querySelector("b") && text.trim() ? text.match(/^\s*/)[0] : ""; // a tint starts at ink
    token.textContent = text.slice(blank.length);
    group.append(blank, token);
  }

  describe(index) {
    const { emitted, accepted, slots, drafted } = this.steps[index];
    if (!drafted) return `Step ${index + 1}\nno drafts, the model’s own token`;
    return `Step ${index + 1} of ${this.steps.length}\n${drafted} drafted, ${slots - 1} verified, ${accepted} accepted: ` +
      `${emitted} token${emitted === 1 ? "" : "s"}`;
  }

  speak(last) { // whole sentences, not tokens, and not more often than every two seconds
    const now = performance.now();
    if (!last && now - this.spokeAt < 2000) return;
    const end = last ? this.text.length : this.text.search(/[.!?\n][^.!?\n]*$/) + 1;
    if (end <= this.spoken) return;
    $("announce").textContent = this.text.slice(this.spoken, end);
    this.spoken = end;
    this.spokeAt = now;
  }

  end(usage, note = "") {
    this.element.classList.remove("streaming");
    this.speak(true);
    const tokens = usage?.completion_tokens ?? this.tokens;
    const seconds = (performance.now() - (this.first ?? this.began)) / 1000;
    const facts = note ? [note] : [];
    if (tokens) facts.push(`${tokens} tokens`);
    if (tokens > 1 && this.steps.length) facts.push(`${(tokens / this.steps.length).toFixed(2)} a step`);
    if (tokens > 1 && seconds > 0) facts.push(`${((tokens - 1) / seconds).toFixed(0)} a second`);
    if (this.first) facts.push(`first after ${(this.first - this.began).toFixed(0)} ms`);
    this.element.querySelector(".stats").textContent = facts.join(" · ");
  }
}

const answers = new WeakMap();

function addMessage(role, name, text = "") {
  $("empty").hidden = true;
  const element = document.createElement("article");
  element.className = `message ${role}`;
  const title = document.createElement("h3");
  title.textContent = name;
  const body = document.createElement("div");
  body.className = "text";
  body.textContent = text;
  const stats = document.createElement("p");
  stats.className = "stats";
  element.append(title, body, ...(role === "user" ? [] : [stats]));
  $("log").append(element);
  $("log").scrollTop = $("log").scrollHeight;
  return element;
}

function request(signal, more) {
  const body = {
    model, messages: conversation, stream: true, temperature: Number($("temperature").value) || 0,
    max_tokens: Math.max(1, Math.floor($("max-tokens").value) || 256), ...more,
  };
  return call("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
}

// Other answers to the same question, only for their load. One request, because a browser opens six connections at most.
async function drain(count, signal) {
  try {
    const temperature = Math.max(Number($("temperature").value) || 0, 0.8); // else all would be the same
    for await (const _ of events(await request(signal, { n: count, temperature }))) { /* read on */ }
  } catch { /* the answer that is shown reports what is wrong */ }
}

async function send(text) {
  conversation.push({ role: "user", content: text });
  addMessage("user", "You", text);
  const answer = new Answer();
  answers.set(answer.body, answer);
  running = new AbortController();
  busy(true);
  let usage = null;
  let note = "";
  try {
    const response = await request(running.signal, { dscale_steps: true, stream_options: { include_usage: true } });
    const others = Number($("others").value);
    if (others) drain(others, running.signal);
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      const log = $("log");
      const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      const choice = chunk.choices?.[0];
      answer.add(choice?.delta?.content ?? "", chunk.dscale ?? choice?.dscale);
      if (atEnd) log.scrollTop = log.scrollHeight;
    }
  } catch (error) {
    note = error.name === "AbortError" ? "stopped" : "failed";
    if (note === "failed") $("problem").textContent = error.message;
  }
  running.abort(); // what runs alongside ends with it
  answer.end(usage, note);
  if (answer.text) conversation.push({ role: "assistant", content: answer.text });
  else conversation.pop();
  if (!answer.text && note === "failed") {
    answer.element.previousElementSibling.remove();
    answer.element.remove();
    $("prompt").value ||= text;
  }
  running = null;
  busy(false);
}

function busy(on) {
  $("stop").hidden = !on;
  $("send").hidden = on;
  $("clear").disabled = on;
  if (document.activeElement === document.body) $("prompt").focus();
}

$("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value.trim();
  if (!text || running) return;
  $("problem").textContent = "";
  $("prompt").value = "";
  send(text);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("chat-form").requestSubmit();
});
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  conversation = [];
  $("log").querySelectorAll(".message").forEach((element) => element.remove());
  $("empty").hidden = false;
  $("prompt").focus();
});

// details of a step: pointer, or arrow keys within a focused answer

let marked = null;
function mark(step) {
  marked?.classList.remove("at");
  marked = step;
  step?.classList.add("at");
}

function showTip(step) {
  const tip = $("tip");
  tip.hidden = !step;
  if (!step) return "";
  const text = answers.get(step.closest(".text")).describe(Number(step.dataset.step));
  tip.textContent = text;
  const at = step.getClientRects()[0];
  const left = Math.min(Math.max(at.left, 8), innerWidth - tip.offsetWidth - 8);
  const above = at.top - tip.offsetHeight - 6;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 4 ? above : at.bottom + 6}px`;
  return text;
}

$("log").addEventListener("pointerover", (event) => showTip(event.target.closest(".step") ?? marked));
$("log").addEventListener("pointerleave", () => showTip(marked));
$("log").addEventListener("scroll", () => { $("tip").hidden = true; });
$("log").addEventListener("focusout", () => { mark(null); showTip(null); });
$("log").addEventListener("keydown", (event) => {
  const steps = event.target.querySelectorAll?.(".step") ?? [];
  const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!way || !event.target.classList.contains("text") || !steps.length) return;
  event.preventDefault();
  const at = [...steps].indexOf(marked);
  mark(steps[at < 0 ? (way > 0 ? 0 : steps.length - 1) : Math.min(Math.max(at + way, 0), steps.length - 1)]);
  marked.scrollIntoView({ block: "nearest" });
  $("announce").textContent = `${marked.textContent}: ${showTip(marked)}`;
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  mark(null);
  showTip(null);
  running?.abort();
});

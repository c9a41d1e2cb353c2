// The strip: one line a request, one cell a row of the last decode step.

import { $ } from "./server.js";

export function canvasOf(id) {
  const canvas = $(id);
  const scale = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { canvas, pen, width, height };
}

export const ink = (id) => getComputedStyle($(id)).color;
let widest = 8; // columns never shrink, so that lanes do not jump

export function drawStrip(lanes) {
  const { canvas, pen, width, height } = canvasOf("strip");
  widest = lanes.reduce((most, lane) => Math.max(most, lane.drafted + 1, lane.slots), widest);
  if (!lanes.length) {
    pen.fillStyle = ink("batch-size");
    pen.font = "13px system-ui, sans-serif";
    pen.textAlign = "center";
    pen.fillText("Nothing is being decoded", width / 2, height / 2);
    pen.textAlign = "start";
  }
  const gap = lanes.length > 24 ? 1 : 2;
  const across = width / widest;
  const down = Math.min(across * 0.8, height / Math.max(lanes.length, 1), 22);
  const inks = ["anchor", "accepted", "rejected", "trimmed"].map((name) => ink(`ink-${name}`));
  lanes.forEach((lane, row) => {
    for (let slot = 0; slot <= Math.max(lane.drafted, lane.slots - 1); slot++) {
      const kind = slot === 0 ? 0 : slot > lane.slots - 1 ? 3 : slot <= lane.accepted ? 1 : 2;
      cell(pen, inks[kind], kind, slot * across, row * down, across - gap, down - gap);
    }
  });
  const sum = (of) => lanes.reduce((total, lane) => total + of(lane), 0);
  const slots = sum((lane) => lane.slots);
  const accepted = sum((lane) => lane.accepted);
  const trimmed = sum((lane) => Math.max(lane.drafted - lane.slots + 1, 0));
  $("batch-size").textContent = lanes.length ? `${lanes.length} request${lanes.length > 1 ? "s" : ""}, ${slots} rows` : "idle";
  canvas.setAttribute("aria-label", lanes.length
    ? `${lanes.length} requests; ${slots} rows verified, ${accepted} drafts accepted, ${slots - lanes.length - accepted} rejected, ${trimmed} trimmed`
    : "Nothing is being decoded");
}

function cell(pen, colour, kind, x, y, width, height) {
  pen.fillStyle = pen.strokeStyle = colour;
  pen.beginPath();
  if (kind === 3) pen.arc(x + width / 2, y + height / 2, Math.min(2, height / 4), 0, 7);
  else if (kind === 2 && height > 5) pen.roundRect(x + 0.75, y + 0.75, width - 1.5, height - 1.5, 2);
  else pen.roundRect(x, y, width, Math.max(height, 1), 2);
  pen.lineWidth = 1.5;
  if (kind === 2 && height > 5) pen.stroke();
  else pen.fill();
}

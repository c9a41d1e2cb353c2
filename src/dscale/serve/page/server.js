// Requests to the server, its event streams, and the API key it may ask for.

export const $ = (id) => document.getElementById(id);

let key = sessionStorage.getItem("dscale-key") || "";
let waiting = () => {};

export async function call(path, options = {}) {
  const headers = { ...(options.body && { "Content-Type": "application/json" }), ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers });
  if (response.status === 401) {
    $("key-form").hidden = false;
    $("key-label").textContent = key ? "The server did not accept this API key" : "The server asks for an API key";
    throw new Error(`${$("key-label").textContent}.`);
  }
  if (!response.ok) throw new Error(await reason(response));
  return response;
}

async function reason(response) {
  const body = await response.text();
  try {
    const { error, detail } = JSON.parse(body);
    return error?.message ?? error ?? JSON.stringify(detail);
  } catch {
    return `The server answered ${response.status}.`;
  }
}

export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value.replaceAll("\r", "")).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
      if (data.length && data[0] !== "[DONE]") yield JSON.parse(data.join("\n"));
    }
  }
}

// resolves once the user has given a key
export const keyGiven = () => new Promise((resolve) => { waiting = resolve; });

export const keyWanted = () => !$("key-form").hidden;

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value;
  sessionStorage.setItem("dscale-key", key);
  $("key-form").hidden = true;
  $("problem").textContent = "";
  waiting();
  $("prompt").focus();
});

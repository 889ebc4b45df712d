// Talking to the server: URLs, the API key, errors worth reading, and server-sent events.

const KEY = "rung.key";

// Storage may be forbidden (private windows, strict settings); the page then works without memory.
export const remember = (name, value) => { try { sessionStorage.setItem(name, value); } catch { /* see above */ } };
export const recall = (name) => { try { return sessionStorage.getItem(name) ?? ""; } catch { return ""; } };

let key = recall(KEY);
export const getKey = () => key;
export const setKey = (value) => { key = value.trim(); remember(KEY, key); };

// Relative to the page, so that it also works behind a proxy that adds a path.
export const url = (path) => new URL(path, document.baseURI).href;

export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

async function failure(response) {
  let detail = "";
  try {
    const { error } = JSON.parse(await response.text());
    detail = error?.message ?? "";
    if (error?.param && !detail.includes(error.param)) detail += ` (${error.param})`;
  } catch { /* not ours: a proxy's page, say */ }
  const wait = response.headers.get("retry-after");
  if (response.status === 401) detail = `${detail || "The server wants an API key."} Type it into “API key” at the top of this page.`;
  if (response.status === 429 && wait) detail += ` Try again in ${wait} s.`;
  return new ApiError(detail.trim() || `The server answered ${response.status} ${response.statusText}.`, response.status);
}

export async function request(path, { body, signal } = {}) {
  const headers = {};
  if (key) headers.authorization = `Bearer ${key}`;
  if (body) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(url(path), {
      method: body ? "POST" : "GET", headers, signal, cache: "no-store", body: body && JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(error.name === "TimeoutError" ? "The server does not answer." : "The server cannot be reached.");
  }
  if (!response.ok) throw await failure(response);
  return response;
}

// The JSON of each event, until [DONE]. An error event, or an end without [DONE], throws.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const lines = (buffer + value).split("\n");
      buffer = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        if (line || !data.length) continue;
        const text = data.join("\n");
        data = [];
        if (text === "[DONE]") return;
        const event = JSON.parse(text);
        if (event.error) throw new ApiError(event.error.message ?? "The server reported an error.");
        yield event;
      }
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    throw new ApiError(error instanceof SyntaxError ? "The server sent an event that is not JSON." : "The connection was lost.");
  } finally {
    reader.cancel().catch(() => {});
  }
  throw new ApiError("The connection closed before the answer was complete.");
}

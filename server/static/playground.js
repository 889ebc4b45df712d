// The playground: a chat or a completion, streamed, with what the server measured of it.

import { ApiError, events, recall, remember, request, url } from "./api.js";
import { count, rate, seconds } from "./format.js";
import { TokenText, readTokens, watchTokens } from "./tokens.js";

const $ = (id) => document.getElementById(id);
const SETTINGS = "rung.settings";
const HINTS = {
  chat: ["Say something to the model, or try:", "Message (Enter sends, Shift+Enter is a new line)", "Send"],
  completion: ["Write the start of a text, or try one; the model goes on with it.", "Prompt (Ctrl+Enter runs it)", "Run"],
};

// For a model that says nothing of itself.
const EXAMPLES = {
  chat: ["Tell me a short story about a fox.", "Explain in two sentences why the sky is blue.", "Write a haiku about the sea."],
  completion: ["Once upon a time", "The three most important things in a good explanation are"],
};

// What /v1/models says of a model, in one or two sentences.
function describe(card) {
  if (!card) return "";
  const noise = card.root?.match(/\((random weights[^)]*)\)/)?.[1];
  const about = noise ?? card.examples?.about;
  const facts = [card.variant, card.max_model_len && `context of ${count(card.max_model_len)} tokens`].filter(Boolean).join(", ");
  const tail = about && facts ? `. ${facts[0].toUpperCase()}${facts.slice(1)}` : facts;
  return about || facts ? `${card.id}: ${about ?? ""}${tail}.` : card.id;
}

// One answer (or question) on the page and, for an answer, its text so far.
class Message {
  constructor(role, parent, prefix = "") {
    this.role = role;
    this.element = document.createElement("article");
    this.element.className = `message ${role}`;
    const name = this.element.appendChild(document.createElement("h2"));
    name.textContent = { user: "You", assistant: "Model", completion: "Completion" }[role];
    const body = this.element.appendChild(document.createElement("div"));
    body.className = "text";
    if (prefix) body.appendChild(Object.assign(document.createElement("span"), { className: "prefix", textContent: prefix }));
    this.body = new TokenText(body);
    parent.append(this.element);
  }
  get text() { return this.body.text; }
  think(text) {
    if (!this.thoughts) {
      this.thoughts = document.createElement("details");
      this.thoughts.appendChild(document.createElement("summary")).textContent = "Reasoning";
      this.element.lastChild.before(this.thoughts);
    }
    this.thoughts.append(text);
  }
  static said(role, text, parent) {
    const message = new Message(role, parent);
    message.body.push(text, []);
    message.body.end();
    return message;
  }
}

// Counts and times of one request. Every token is counted as it comes; the server's own count replaces it at the end.
class Meter {
  constructor() {
    this.sent = performance.now();
    this.tokens = 0;
    this.finish = "";
  }
  saw(n) {
    this.last = performance.now();
    if (this.first === undefined) { this.first = this.last; this.before = n; }
    this.tokens += n;
  }
  // The first chunk's tokens belong to the prefill, not to the time that decoding took.
  get rate() { return (1000 * (this.tokens - this.before)) / (this.last - this.first); }
  show() {
    $("fact-tokens").textContent = count(this.tokens);
    $("fact-rate").textContent = this.tokens > this.before ? rate(this.rate) : "–";
    $("fact-ttft").textContent = seconds((this.first - this.sent) / 1000);
    $("fact-prompt").textContent = count(this.prompt);
    $("fact-finish").textContent = this.finish || "–";
  }
}

export class Playground {
  #chat = []; // Messages, oldest first
  #completion = null; // {prompt, message}
  #running = null; // AbortController of the request under way
  #drafts = { chat: "", completion: "" };
  #frame = 0;

  constructor({ showError, clearError, model, card, onUnauthorized }) {
    Object.assign(this, { showError, clearError, model, card, onUnauthorized });
    this.#restore();
    watchTokens($("output"));
    for (const radio of document.getElementsByName("mode")) radio.addEventListener("change", () => this.#switchMode());
    $("composer").addEventListener("submit", (e) => { e.preventDefault(); this.#submit(); });
    $("prompt").addEventListener("keydown", (e) => {
      const plain = this.mode === "chat" && !e.shiftKey && !e.altKey;
      if (e.key === "Enter" && !e.isComposing && (plain || e.ctrlKey || e.metaKey)) { e.preventDefault(); this.#submit(); }
    });
    $("stop").addEventListener("click", () => this.#running?.abort());
    document.addEventListener("keydown", (e) => { if (e.key === "Escape") this.#running?.abort(); });
    $("clear").addEventListener("click", () => this.#clear());
    $("again").addEventListener("click", () => this.#regenerate());
    $("copy").addEventListener("click", (e) => this.#copy(e.target, this.#transcript()));
    $("curl").addEventListener("click", (e) => this.#copy(e.target, this.#curl()));
    $("defaults").addEventListener("click", () => { $("sampling").reset(); this.#save(); this.#draw(); });
    $("sampling").addEventListener("input", () => { this.#save(); this.#draw(); });
    $("sampling").addEventListener("submit", (e) => e.preventDefault());
    this.#mode = this.mode;
    this.#draw();
  }

  #mode;
  get mode() { return document.querySelector("[name=mode]:checked").value; }

  #switchMode() {
    this.#running?.abort();
    this.#drafts[this.#mode] = $("prompt").value;
    this.#mode = this.mode;
    $("prompt").value = this.#drafts[this.#mode];
    const messages = this.#mode === "chat" ? this.#chat : [this.#completion?.message].filter(Boolean);
    $("messages").replaceChildren(...messages.map((m) => m.element));
    this.#draw();
  }

  draw() { this.#draw(); }

  #example(text) {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: text });
    button.addEventListener("click", () => { $("prompt").value = text; this.#submit(); });
    return button;
  }

  // Whatever depends on the state: what can be pressed, what is written on it.
  #draw() {
    const [empty, label, verb] = HINTS[this.#mode];
    const has = this.#mode === "chat" ? this.#chat.length > 0 : this.#completion !== null;
    const busy = this.#running !== null;
    $("about").textContent = describe(this.card());
    $("hint").textContent = empty;
    const examples = this.card()?.examples?.[this.#mode] ?? [];
    $("examples").replaceChildren(...(examples.length ? examples : EXAMPLES[this.#mode]).map((text) => this.#example(text)));
    $("empty").hidden = has;
    $("prompt-label").textContent = label;
    $("prompt").placeholder = label;
    $("send").textContent = verb;
    $("send").hidden = busy;
    $("stop").hidden = !busy;
    $("clear").disabled = $("copy").disabled = !has;
    $("again").disabled = !has || busy;
    $("system-field").hidden = this.#mode !== "chat";
    $("output").setAttribute("aria-busy", busy);
    $("output").classList.toggle("plain", !$("probabilities").checked);
    $("legend").hidden = !$("probabilities").checked;
  }

  #save() {
    const values = Object.fromEntries(new FormData($("sampling")));
    remember(SETTINGS, JSON.stringify({
      ...values, system: $("system").value, stops: $("stops").value, probabilities: $("probabilities").checked,
    }));
  }

  #restore() {
    const { system, stops, probabilities, ...values } = JSON.parse(recall(SETTINGS) || "null") ?? {};
    if (system === undefined) return;
    $("system").value = system;
    $("stops").value = stops;
    $("probabilities").checked = probabilities;
    for (const [name, value] of Object.entries(values)) {
      const input = $("sampling").elements[name];
      if (input) input.value = value;
    }
  }

  #request(prompt) {
    const body = { model: this.model(), stream: true, stream_options: { include_usage: true } };
    for (const input of $("sampling").querySelectorAll("input[type=number]")) {
      if (input.value !== "") body[input.name] = input.valueAsNumber;
    }
    const unescape = (line) => line.replace(/\\([nrt\\])/g, (_, c) => ({ n: "\n", r: "\r", t: "\t", "\\": "\\" })[c]);
    const stop = $("stops").value.split("\n").filter(Boolean).map(unescape);
    if (stop.length) body.stop = stop;
    const probabilities = $("probabilities").checked;
    if (this.#mode === "completion") return ["v1/completions", { ...body, prompt, ...(probabilities && { logprobs: 5, return_drafted: true }) }];
    const messages = this.#chat.map((m) => ({ role: m.role, content: m.text }));
    if ($("system").value.trim()) messages.unshift({ role: "system", content: $("system").value });
    if (prompt) messages.push({ role: "user", content: prompt });
    return ["v1/chat/completions", { ...body, messages, ...(probabilities && { logprobs: true, top_logprobs: 5, return_drafted: true }) }];
  }

  #ready() {
    if (this.#running) return false;
    const form = $("sampling");
    if (!form.checkValidity()) $("settings").open = true; // a browser cannot point at a field in a closed box
    return form.reportValidity();
  }

  async #submit() {
    const prompt = $("prompt").value;
    if (!$("composer").reportValidity() || !this.#ready()) return;
    if (this.#mode === "completion") return this.#complete(prompt);
    const question = Message.said("user", prompt, $("messages"));
    this.#chat.push(question);
    $("prompt").value = "";
    if (await this.#answer() || !this.#chat.includes(question)) return;
    // Nothing came: give the question back, so that another try is one key away.
    this.#chat = this.#chat.filter((m) => m !== question);
    question.element.remove();
    if (this.#mode === "chat") $("prompt").value ||= prompt;
    else this.#drafts.chat ||= prompt;
    this.#draw();
  }

  async #answer() {
    const [path, body] = this.#request();
    const message = new Message("assistant", $("messages"));
    this.#chat.push(message);
    const ok = await this.#stream(path, body, message);
    if (!message.text && !ok) {
      this.#chat = this.#chat.filter((m) => m !== message);
      message.element.remove();
    }
    return ok || message.text !== "";
  }

  async #complete(prompt) {
    $("messages").replaceChildren();
    const message = new Message("completion", $("messages"), prompt);
    this.#completion = { prompt, message };
    await this.#stream(...this.#request(prompt), message);
  }

  async #regenerate() {
    if (!this.#ready()) return;
    if (this.#mode === "completion") return void this.#complete(this.#completion.prompt);
    while (this.#chat.at(-1)?.role === "assistant") this.#chat.pop().element.remove();
    await this.#answer();
    this.#draw();
  }

  // Streams one answer into `message`; true when it ended by itself.
  async #stream(path, body, message) {
    const abort = (this.#running = new AbortController());
    const meter = new Meter();
    message.element.classList.add("streaming");
    this.clearError();
    this.#draw();
    meter.show();
    $("announce").textContent = "Generating";
    let ok = false;
    try {
      for await (const event of events(await request(path, { body, signal: abort.signal }))) {
        if (event.usage) {
          meter.prompt = event.usage.prompt_tokens;
          meter.tokens = event.usage.completion_tokens ?? meter.tokens;
        }
        const choice = event.choices?.[0];
        if (choice) {
          const text = choice.delta ? choice.delta.content ?? "" : choice.text ?? "";
          const thought = choice.delta?.reasoning_content;
          const tokens = readTokens(choice.logprobs, choice.drafted);
          if (tokens.some((t) => t.drafted)) $("legend-drafted").hidden = false;
          if (text || thought || tokens.length) meter.saw(tokens.length || 1);
          if (thought) message.think(thought);
          else message.body.push(text, tokens);
          meter.finish = choice.finish_reason ?? meter.finish;
        }
        this.#refresh(meter);
      }
      ok = true;
    } catch (error) {
      meter.finish = error.name === "AbortError" ? "you" : "error";
      if (error.name !== "AbortError") {
        if (!(error instanceof ApiError)) console.error(error);
        this.showError(error.message);
        if (error.status === 401) this.onUnauthorized();
      }
    }
    message.body.end();
    message.element.classList.remove("streaming");
    this.#running = null;
    this.#refresh(meter);
    this.#draw();
    $("announce").textContent = `${ok ? "Done" : "Stopped"}, ${count(meter.tokens)} tokens`;
    return ok;
  }

  // At most once a frame: reading the scroll position for each token would lay the page out for each token.
  #refresh(meter) {
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      meter.show();
      const out = $("output");
      if (out.scrollHeight - out.scrollTop - out.clientHeight < 120) out.scrollTop = out.scrollHeight;
    });
  }

  #clear() {
    this.#running?.abort();
    if (this.#mode === "chat") this.#chat = [];
    else this.#completion = null;
    $("messages").replaceChildren();
    this.clearError();
    this.#draw();
    $("prompt").focus();
  }

  #transcript() {
    if (this.#mode === "completion") return this.#completion.prompt + this.#completion.message.text;
    if (this.#chat.length <= 2) return this.#chat.at(-1).text;
    return this.#chat.map((m) => `${m.role === "user" ? "You" : "Model"}: ${m.text}`).join("\n\n");
  }

  // The next request as a shell command; the key stays out of it.
  #curl() {
    const draft = $("prompt").value || (this.#mode === "completion" ? this.#completion?.prompt ?? "" : "");
    const [path, body] = this.#request(draft);
    const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;
    return `curl -N ${quote(url(path))} -H 'Content-Type: application/json' -H "Authorization: Bearer $RUNG_API_KEY" \\\n  -d ${quote(JSON.stringify(body))}`;
  }

  async #copy(button, text) {
    try {
      await navigator.clipboard.writeText(text);
    } catch { // no clipboard outside https and localhost
      const area = document.body.appendChild(Object.assign(document.createElement("textarea"), { value: text }));
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    const label = button.textContent;
    button.textContent = "Copied";
    button.disabled = true;
    setTimeout(() => { button.textContent = label; button.disabled = false; this.#draw(); }, 1000);
  }
}

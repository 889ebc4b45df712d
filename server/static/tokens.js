// Generated text as one span a token, tinted by probability, underlined if it was drafted, and the card that shows a token's alternatives.

import { probability, visible } from "./format.js";

const card = document.getElementById("tip");
const tokensOf = new WeakMap(); // span -> the tokens that made its text

const token = (text, logprob, top, drafted) => ({ text, p: logprob == null ? null : Math.exp(logprob), top, drafted: drafted ?? false });
const byProbability = (top) => top.sort((a, b) => b.p - a.p);

// Both endpoints' logprobs in one shape: [{text, p, top: [{text, p}], drafted}]. `drafted`: for each token, if the server says it.
export function readTokens(logprobs, drafted = []) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map((t, i) =>
      token(t.token, t.logprob, byProbability((t.top_logprobs ?? []).map((a) => ({ text: a.token, p: Math.exp(a.logprob) }))), drafted[i]));
  }
  return (logprobs.tokens ?? []).map((text, i) =>
    token(text, logprobs.token_logprobs?.[i],
      byProbability(Object.entries(logprobs.top_logprobs?.[i] ?? {}).map(([a, lp]) => ({ text: a, p: Math.exp(lp) }))), drafted[i]));
}

// Text and tokens of a stream need not arrive together: a server holds back text that may become a stop string or is half
// a character. The text is always shown at once; a token gets its own span as soon as its text is complete.
export class TokenText {
  constructor(parent) {
    this.parent = parent;
    this.text = "";
    this.rest = ""; // text not yet given to a token
    this.waiting = []; // tokens not yet given their text
    this.tail = parent.appendChild(document.createElement("span"));
  }

  push(text, tokens) {
    this.text += text;
    this.rest += text;
    this.waiting.push(...tokens);
    if (!this.waiting.length) return this.#settle(this.rest, []);
    while (this.rest && this.waiting.length) {
      const at = this.waiting.findIndex((t) => t.text); // tokens with no text of their own belong to the next one's
      const own = at < 0 ? "" : this.waiting[at].text;
      // The first space of an answer is often stripped from the text but not from the token.
      const forms = [own, own.trimStart()].filter(Boolean);
      const match = forms.find((form) => this.rest.startsWith(form));
      if (match) this.#settle(match, this.waiting.splice(0, at + 1));
      else if (forms.some((form) => form.startsWith(this.rest))) break;
      else this.#settle(this.rest, this.waiting.splice(0)); // bytes of one character: they share a span
    }
    this.tail.textContent = this.rest;
  }

  end() {
    if (this.rest) this.#settle(this.rest, this.waiting.splice(0));
    this.tail.remove();
  }

  #settle(text, tokens) {
    this.rest = this.rest.slice(text.length);
    const span = document.createElement("span");
    span.textContent = text;
    if (tokens.length) {
      const known = tokens.map((t) => t.p).filter((p) => p != null);
      span.className = tokens.some((t) => t.drafted) ? "token drafted" : "token";
      // One tab stop an answer; the arrow keys go from token to token.
      span.tabIndex = this.parent.querySelector(".token") ? -1 : 0;
      if (known.length) span.style.setProperty("--p", Math.min(...known).toFixed(4));
      tokensOf.set(span, tokens);
    }
    this.tail.before(span);
    this.tail.textContent = this.rest;
  }
}

function row(text, p, chosen) {
  const tr = document.createElement("tr");
  if (chosen) tr.className = "chosen";
  const name = tr.appendChild(document.createElement("th"));
  name.scope = "row";
  name.textContent = visible(text);
  const bar = tr.appendChild(document.createElement("td")).appendChild(document.createElement("i"));
  bar.style.width = `${100 * Math.min(1, p ?? 0)}%`;
  tr.appendChild(document.createElement("td")).textContent = probability(p);
  return tr;
}

function fill(tokens) {
  card.replaceChildren();
  for (const { text, p, top, drafted } of tokens) {
    const title = card.appendChild(document.createElement("p"));
    title.append(Object.assign(document.createElement("b"), { textContent: visible(text) }), ` ${probability(p)}${drafted ? ", drafted" : ""}`);
    const table = card.appendChild(document.createElement("table"));
    table.append(...top.map((a) => row(a.text, a.p, a.text === text)));
    if (top.length && !top.some((a) => a.text === text)) table.append(row(text, p, true));
  }
}

let shown = null;

function hide() {
  shown?.removeAttribute("aria-describedby");
  shown = null;
  card.hidden = true;
}

function show(span) {
  if (span === shown) return;
  hide();
  fill(tokensOf.get(span));
  shown = span;
  span.setAttribute("aria-describedby", card.id);
  card.hidden = false;
  const box = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const { width, height } = card.getBoundingClientRect();
  const { clientWidth, clientHeight } = document.documentElement; // without the scroll bars
  const below = box.bottom + 6;
  card.style.left = `${Math.max(8, Math.min(box.left, clientWidth - width - 8))}px`;
  const above = Math.max(8, box.top - height - 6);
  card.style.top = `${below + height < clientHeight - 8 ? below : Math.min(above, Math.max(8, clientHeight - height - 8))}px`;
}

const tokenAt = (node) => (node instanceof Element && node.closest(".token")) || null;

export function watchTokens(root) {
  root.addEventListener("pointerover", (e) => { const span = tokenAt(e.target); if (span) show(span); else hide(); });
  root.addEventListener("pointerleave", hide);
  root.addEventListener("focusin", (e) => { const span = tokenAt(e.target); if (span) show(span); });
  root.addEventListener("focusout", hide);
  root.addEventListener("scroll", hide, { passive: true });
  root.addEventListener("keydown", (e) => {
    if (e.key === "Escape") return hide();
    const span = tokenAt(e.target);
    if (!span || e.ctrlKey || e.metaKey || e.altKey) return;
    const all = [...span.parentElement.querySelectorAll(".token")];
    const to = { ArrowLeft: all.indexOf(span) - 1, ArrowRight: all.indexOf(span) + 1, Home: 0, End: all.length - 1 }[e.key];
    if (to === undefined) return;
    e.preventDefault();
    if (!all[to]) return;
    span.tabIndex = -1;
    all[to].tabIndex = 0;
    all[to].focus();
  });
}

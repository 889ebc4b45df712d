// The dashboard: GET /stats once a second, as tiles and as lines over the last two minutes.

import { request } from "./api.js";
import { count, duration, rate, seconds, share } from "./format.js";

const WINDOW = 120; // seconds
const INTERVAL = 1000;
const SVG = "http://www.w3.org/2000/svg";
const $ = (id) => document.getElementById(id);

const kvUse = (s) => (s.kv_blocks_total ? s.kv_blocks_used / s.kv_blocks_total : null);
const missing = "–";

const IDENTITY = [
  ["Model", (s) => s.model],
  ["Variant", (s) => s.variant],
  ["Communicator", (s) => s.communicator],
  ["Ranks", (s) => s.world_size],
  ["Device", (s) => s.device],
  ["Type", (s) => s.dtype],
  ["Context", (s) => (s.max_model_len == null ? null : `${count(s.max_model_len)} tokens`)],
  ["Up", (s) => (s.uptime_seconds == null ? null : duration(s.uptime_seconds))],
];

// [title, number, small print]
const TILES = [
  ["Generated tokens/s", (s) => rate(s.generation_tokens_per_second), (s) => (s.accepted_length != null ? `${s.accepted_length.toFixed(1)} accepted in each draft` : "")],
  ["Prompt tokens/s", (s) => rate(s.prompt_tokens_per_second)],
  ["Running", (s) => count(s.running)],
  ["Waiting", (s) => count(s.waiting)],
  ["KV cache", (s) => share(kvUse(s)), (s) => `${count(s.kv_blocks_used)} of ${count(s.kv_blocks_total)} blocks`],
  ["First token", (s) => seconds(s.ttft_seconds?.p50), (s) => `p95 ${seconds(s.ttft_seconds?.p95)}`],
  ["Between tokens", (s) => seconds(s.inter_token_seconds?.p50), (s) => `p95 ${seconds(s.inter_token_seconds?.p95)}`],
  ["Step", (s) => seconds(s.step_seconds), (s) => (s.all_reduce_share != null ? `${share(s.all_reduce_share)} in all-reduces` : s.idle_share != null ? `GPU idle ${share(s.idle_share)}` : "")],
  ["Prefix cache hits", (s) => share(s.prefix_hit_rate)],
  ["Preemptions", (s) => count(s.preemptions)],
];

// [title, format, least top of the axis, {series: value}]
const CHARTS = [
  ["Generated tokens/s", rate, 10, { generated: (s) => s.generation_tokens_per_second }],
  ["Prompt tokens/s", rate, 10, { prompt: (s) => s.prompt_tokens_per_second }],
  ["Requests", count, 4, { running: (s) => s.running, waiting: (s) => s.waiting }],
  ["KV cache in use", share, 1, { used: kvUse }],
  ["First token", seconds, 0.001, { p50: (s) => s.ttft_seconds?.p50, p95: (s) => s.ttft_seconds?.p95 }],
  ["Between tokens", seconds, 0.001, { p50: (s) => s.inter_token_seconds?.p50, p95: (s) => s.inter_token_seconds?.p95 }],
];

// The least round number that holds x: the top of an axis.
function roundUp(x) {
  const power = 10 ** Math.floor(Math.log10(x));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((m) => m * power).find((top) => top >= x * 0.9999);
}

class Chart {
  constructor(parent, [title, format, least, series]) {
    Object.assign(this, { title, format, least, series: Object.entries(series), history: [], now: 0 });
    this.element = parent.appendChild(document.createElement("figure"));
    this.element.className = "panel chart";
    const caption = this.element.appendChild(document.createElement("figcaption"));
    caption.appendChild(document.createElement("span")).textContent = title;
    this.when = caption.appendChild(document.createElement("small"));
    this.legend = caption.appendChild(document.createElement("span"));
    this.legend.className = "keys";
    const plot = this.element.appendChild(document.createElement("div"));
    plot.className = "plot";
    this.top = plot.appendChild(document.createElement("small"));
    // Stretched to the box (lines keep their width), so that a resize needs no script.
    this.svg = plot.appendChild(document.createElementNS(SVG, "svg"));
    this.svg.setAttribute("viewBox", "0 0 100 100");
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.svg.setAttribute("role", "img");
    for (const y of [0, 50, 100]) this.#path("grid").setAttribute("d", `M0 ${y}H100`);
    this.lines = this.series.map((_, i) => this.#path(`line line-${i}`));
    this.area = this.series.length === 1 ? this.#path("area") : null;
    this.cursor = this.#path("cursor");
    const axis = this.element.appendChild(document.createElement("div"));
    axis.className = "axis";
    for (const text of ["2 min ago", "1 min", "now"]) axis.appendChild(document.createElement("small")).textContent = text;
    this.keys = this.series.map(([name], i) => {
      const key = this.legend.appendChild(document.createElement("span"));
      key.className = `key line-${i}`;
      key.append(document.createElement("i"), this.series.length > 1 ? `${name} ` : "");
      return key.appendChild(document.createElement("b"));
    });
    plot.addEventListener("pointermove", (e) => {
      const box = this.svg.getBoundingClientRect();
      this.pointer = (e.clientX - box.left) / box.width;
      this.#read();
    });
    plot.addEventListener("pointerleave", () => { this.pointer = undefined; this.#read(); });
  }

  #path(name) {
    const path = this.svg.appendChild(document.createElementNS(SVG, "path"));
    path.setAttribute("class", name);
    return path;
  }

  #x(time) { return 100 * (1 - (this.now - time) / WINDOW); }

  draw(history, now) {
    this.history = history;
    this.now = now;
    const values = history.flatMap(({ stats }) => this.series.map(([, of]) => of(stats))).filter(Number.isFinite);
    const top = roundUp(Math.max(this.least, ...values));
    this.top.textContent = this.format(top);
    this.series.forEach(([, of], i) => {
      let d = "";
      let from = null; // x where the present unbroken stretch began
      let area = "";
      let x = 0;
      const close = () => { if (from !== null) area += `L${x} 100L${from} 100Z`; from = null; };
      for (const { time, stats } of history) {
        const value = of(stats);
        if (!Number.isFinite(value)) { close(); continue; } // a gap, not a zero
        if (from !== null && this.#x(time) - x > (100 * 5) / WINDOW) close();
        x = +this.#x(time).toFixed(2);
        const point = `${from === null ? "M" : "L"}${x} ${(100 * (1 - value / top)).toFixed(2)}`;
        from ??= x;
        d += point;
        area += point;
      }
      close();
      this.lines[i].setAttribute("d", d);
      if (this.area) this.area.setAttribute("d", area);
    });
    this.#read();
  }

  // The legend's numbers: those under the pointer, or the newest.
  #read() {
    const pointed = this.pointer !== undefined && this.history.length > 0;
    const at = this.now - (1 - this.pointer) * WINDOW;
    const sample = pointed
      ? this.history.reduce((a, b) => (Math.abs(b.time - at) < Math.abs(a.time - at) ? b : a))
      : this.history.at(-1);
    this.when.textContent = pointed ? `${Math.round(this.now - sample.time)} s ago` : "";
    this.cursor.setAttribute("d", pointed ? `M${this.#x(sample.time)} 0V100` : "");
    const texts = this.series.map(([, of]) => (sample ? this.format(of(sample.stats)) : missing));
    this.keys.forEach((key, i) => { key.textContent = texts[i]; });
    const summary = this.series.map(([name], i) => `${name} ${texts[i]}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.title}, last two minutes: ${summary}`);
  }
}

// A list of terms with one cell for each of `rows`; returns the function that fills it.
function list(parent, rows) {
  const cells = rows.map(([title, , note]) => {
    const box = parent.appendChild(document.createElement("div"));
    box.appendChild(document.createElement("dt")).textContent = title;
    const value = box.appendChild(document.createElement("dd"));
    value.textContent = missing;
    return { value, note: note && box.appendChild(Object.assign(document.createElement("dd"), { className: "note" })) };
  });
  return (stats) => rows.forEach(([, of, note], i) => {
    cells[i].value.textContent = of(stats) ?? missing;
    if (note) cells[i].note.textContent = note(stats);
  });
}

// For each source of drafts, since the start: how many tokens of a draft were accepted.
const draftTile = (source) => [
  `Accepted of a draft: ${source}`,
  ({ drafts }) => { const { drafts: made, accepted } = drafts[source]; return made ? (accepted / made).toFixed(2) : missing; },
  ({ drafts }) => `${count(drafts[source].accepted)} of ${count(drafts[source].tokens)} tokens`,
];

export class Dashboard {
  #sources = "";
  #history = [];
  #timer = 0;
  #polling = false;

  // `onStatus(text | null)`: the server's own word, or null when it cannot be asked.
  constructor(onStatus) {
    this.onStatus = onStatus;
    this.fillIdentity = list($("identity"), IDENTITY);
    this.fillTiles = list($("tiles"), TILES);
    this.charts = CHARTS.map((chart) => new Chart($("charts"), chart));
    // Polled behind the playground too, so that the lines have a past; a hidden window asks for nothing.
    document.addEventListener("visibilitychange", () => this.poll());
    this.poll();
  }

  async poll() {
    clearTimeout(this.#timer);
    if (document.hidden || this.#polling) return;
    this.#polling = true;
    const started = performance.now();
    try {
      const stats = await (await request("stats", { signal: AbortSignal.timeout(5000) })).json();
      this.#history.push({ time: performance.now() / 1000, stats });
      this.fillIdentity(stats);
      this.fillTiles(stats);
      this.#showDrafts(stats);
      this.#trouble("");
      this.onStatus(stats.status);
    } catch (error) {
      this.#trouble(`These numbers are old. ${error.message}`);
      this.onStatus(null);
    }
    const now = performance.now() / 1000;
    this.#history = this.#history.filter(({ time }) => now - time <= WINDOW);
    for (const chart of this.charts) chart.draw(this.#history, now);
    this.#polling = false;
    this.#timer = setTimeout(() => this.poll(), Math.max(0, INTERVAL - (performance.now() - started)));
  }

  #showDrafts(stats) {
    const sources = Object.keys(stats.drafts ?? {});
    if (sources.join() !== this.#sources) { // new ranks may have others
      this.#sources = sources.join();
      $("drafts").replaceChildren();
      $("drafts").hidden = !sources.length;
      this.fillDrafts = list($("drafts"), sources.map(draftTile));
    }
    this.fillDrafts?.(stats);
  }

  #trouble(text) {
    if ($("stats-error").textContent !== text) $("stats-error").textContent = text;
    $("stats-error").hidden = !text;
    $("dashboard").classList.toggle("stale", text !== "");
  }
}

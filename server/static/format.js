// Numbers as people read them. Anything that is not a finite number is a dash.

const known = (format) => (x) => (Number.isFinite(x) ? format(x) : "–");
const digits = (x, n) => x.toLocaleString("en", { maximumFractionDigits: n, minimumFractionDigits: n });

export const count = known((x) => Math.round(x).toLocaleString("en"));
export const rate = known((x) => digits(x, x < 100 ? 1 : 0));
export const share = known((x) => `${digits(100 * x, 100 * x < 10 ? 1 : 0)}%`);

export const seconds = known((s) => {
  if (s >= 1) return `${digits(s, s < 10 ? 2 : 1)} s`;
  const ms = 1000 * s;
  return `${digits(ms, ms < 10 ? 2 : ms < 100 ? 1 : 0)} ms`;
});

export const duration = known((s) => {
  const [d, h, m] = [Math.floor(s / 86400), Math.floor(s / 3600) % 24, Math.floor(s / 60) % 60];
  if (d) return `${d} d ${h} h`;
  if (h) return `${h} h ${m} min`;
  return m ? `${m} min ${Math.floor(s % 60)} s` : `${Math.floor(s)} s`;
});

export const probability = known((p) => {
  const percent = 100 * p;
  if (percent > 0 && percent < 0.01) return "< 0.01%";
  return `${digits(percent, percent >= 99.95 ? 0 : percent < 1 ? 2 : 1)}%`;
});

// A token's text with its white space and control characters made visible.
export const visible = (text) =>
  text === "" ? "(empty)" : text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "␣").replace(/[\u0000-\u001f\u007f]/g, "�");

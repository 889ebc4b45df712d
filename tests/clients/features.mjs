// As features.py, for scripts of Node.
export const URL_ = process.env.BASE_URL, MODEL = process.env.MODEL;
export const THINKING = process.env.THINKING_URL;
export const THOUGHT = "17 and 25 are 42.", ANSWER = "It is 42.", SEEN = "I thought of it.";
export const HELLO = "What is 17 plus 25?";
const tried = [];
export const feature = (api, name, attempt) => tried.push({ api, name, attempt });
export function expect(condition, message) {
  if (!condition) throw new Error(message);
}
export async function run() {
  for (const { api, name, attempt } of tried) {
    let ok = true, detail = "";
    try {
      detail = String((await attempt()) ?? "").slice(0, 80);
    } catch (e) {
      ok = false;
      detail = `${e.name}: ${e.message} ${e.responseBody ?? ""}`.replace(/\s+/g, " ").slice(0, 400);
    }
    console.log(JSON.stringify({ api, feature: name, ok, detail }));
  }
  process.exit(0);
}

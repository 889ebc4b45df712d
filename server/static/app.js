// The page: tabs, connection, errors. playground.js and dashboard.js fill the two views.

import { getKey, recall, remember, request, setKey } from "./api.js";
import { Dashboard } from "./dashboard.js";
import { Playground } from "./playground.js";

const $ = (id) => document.getElementById(id);
const MODEL = "rung.model";

function showError(text) {
  $("banner-text").textContent = text;
  $("banner").hidden = false;
}

function clearError() {
  $("banner").hidden = true;
}

// --- tabs: the address's #hash says which is open ---

const tabs = [...document.querySelectorAll("[role=tab]")];

function openTab() {
  const name = location.hash === "#dashboard" ? "dashboard" : "playground";
  for (const tab of tabs) {
    const open = tab.getAttribute("aria-controls") === name;
    tab.setAttribute("aria-selected", open);
    tab.tabIndex = open ? 0 : -1;
    $(tab.getAttribute("aria-controls")).hidden = !open;
  }
}

for (const [i, tab] of tabs.entries()) {
  tab.addEventListener("click", () => { location.hash = tab.getAttribute("aria-controls"); });
  tab.addEventListener("keydown", (e) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[e.key];
    if (!step) return;
    const next = tabs[(i + step + tabs.length) % tabs.length];
    next.focus();
    next.click();
  });
}
addEventListener("hashchange", openTab);
openTab();

// --- connection ---

let cards = new Map(); // of /v1/models, by id

async function loadModels() {
  try {
    const { data } = await (await request("v1/models")).json();
    const before = $("model").value || recall(MODEL);
    $("model").replaceChildren(...data.map(({ id }) => new Option(id, id, false, id === before)));
    cards = new Map(data.map((card) => [card.id, card]));
    playground.draw();
    clearError();
  } catch (error) {
    showError(error.message);
    if (error.status === 401) $("key").focus();
  }
}

$("key").value = getKey();
$("key").addEventListener("change", () => { setKey($("key").value); loadModels(); });
$("model").addEventListener("change", () => { remember(MODEL, $("model").value); playground.draw(); });
$("connection").addEventListener("submit", (e) => { e.preventDefault(); $("key").blur(); }); // blur commits the change
$("banner-close").addEventListener("click", clearError);

// --- views ---

// On a narrow screen the settings fold away above the conversation.
const narrow = matchMedia("(max-width: 52rem)");
const fold = () => { $("settings").open = !narrow.matches; };
narrow.addEventListener("change", fold);
fold();

const playground = new Playground({
  showError, clearError, model: () => $("model").value, card: () => cards.get($("model").value), onUnauthorized: () => $("key").focus(),
});

const STATES = { ready: "good", loading: "wait", recovering: "wait", draining: "wait" };
let last;
new Dashboard((status) => {
  const text = status ?? "unreachable";
  if (text === last) return;
  last = text;
  $("health").textContent = text;
  $("health").dataset.state = STATES[text] ?? "bad";
  if (status && !$("model").options.length || status === "ready" && ![...cards.values()].some((card) => card.variant)) {
    loadModels(); // it has just come up, or come back, or loaded its model
  }
});
loadModels();

// The live view: polls /residency and /slots twice a second while the page is visible, and draws the changes.

import { ExpertMap, IN_USE, LOADING, ON_DEVICE, PINNED, RESIDENT, drawLine } from "./charts.js";

const PERIOD_MS = 500;
const SPAN = 120; // the longest time that lines show, in seconds
const FADING = 0.93; // factor of the recent uses from one reading to the next

const $ = (id) => document.getElementById(id);
const map = new ExpertMap($("map"));

const NOTES = {
  lossless: "If memory has no room for an expert, it is read again when a layer needs it. Answers stay the same.",
  lossy: "A lossy setting is on: answers depend on which experts are in memory.",
};

let key = sessionStorage.getItem("pyorch-key") ?? "";
let last = null; // the last reading
let heat = []; // by layer and expert: uses, fading
let history = [];
let asksSlots = true;
let sliding = false;

class Refused extends Error {}

async function ask(path, body) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (body) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, { headers, method: body ? "POST" : "GET", body: body && JSON.stringify(body), cache: "no-store" });
  if (answer.status === 401) throw new Refused("This key is not accepted.");
  const value = await answer.json();
  if (!answer.ok) throw new Error(value.error?.message ?? answer.statusText);
  return value;
}

const size = (n) => {
  const [unit, name] = n >= 2 ** 30 ? [2 ** 30, "GiB"] : n >= 2 ** 20 ? [2 ** 20, "MiB"] : [2 ** 10, "KiB"];
  return `${(n / unit).toFixed(n / unit < 10 ? 1 : 0)} ${name}`;
};
const percent = (share) => (share === null ? "–" : `${(100 * share).toFixed(1)} %`);
const ms = (n) => (!n ? "–" : n < 1000 ? `${n.toFixed(n < 10 ? 1 : 0)} ms` : `${(n / 1000).toFixed(1)} s`);

// Rates and shares between two readings.
function rates(now, before) {
  const seconds = now.seconds - before.seconds;
  const grown = (name) => now.totals[name] - before.totals[name];
  const uses = grown("hits") + grown("misses");
  const on_device = grown("device_hits") + grown("device_misses");
  const n_layers = now.layers.filter((layer) => layer.hits + layer.misses + layer.device_hits > 0).length || 1;
  const foreseen = grown("prefetch_hits");
  const absent = foreseen + grown("misses") - grown("prefetch_late");
  return {
    hit: uses > 0 ? grown("hits") / uses : null,
    device: on_device > 0 ? grown("device_hits") / on_device : null,
    tokens: grown("tokens") / n_layers / seconds,
    read: grown("bytes_read") / seconds,
    stall: Math.min(1, grown("stall_ns") / 1e9 / seconds),
    recall: absent > 0 && foreseen + grown("prefetch_loads") > 0 ? Math.min(1, foreseen / absent) : null,
  };
}

function show(now) {
  if (last && now.seconds > last.seconds) {
    history.push([now.seconds, rates(now, last)]);
    history = history.filter(([t]) => now.seconds - t <= SPAN);
  }
  $("model").textContent = now.model;
  document.title = `pyorch · ${now.model}`;
  drawFigures(now.totals);
  warm(now);
  drawMap(now);
  showBudget(now.settings);
  $("budget-note").textContent = NOTES[now.settings.substitution || now.totals.speculated ? "lossy" : "lossless"];
  $("advice").textContent = now.settings.advice;
  const { policy, prefetch, substitution, device } = now.settings;
  const { device_used_bytes, device_bytes, device_ahead, device_ahead_hits } = now.totals;
  $("settings").textContent = `policy ${policy} · prefetch ${prefetch} · ${substitution ? `lossy: ${substitution}, ${now.totals.substituted} slots substituted, ${now.totals.dropped} dropped, ${now.totals.ghosts} by ghosts` : "lossless"} · ${now.totals.evictions} evictions · ${size(now.totals.bytes_read)} read${device ? ` · ${device}: ${size(device_used_bytes)} of its memory used, ${size(device_bytes)} uploaded${device_ahead ? `, ${device_ahead_hits} of ${device_ahead} forecasts right` : ""}` : ""}`;
  $("on-device").hidden = $("device-legend").hidden = !device;
  $("hit-rate-of").textContent = device ? "hit rate, memory, of the rest" : "hit rate";
  last = now;
}

// Figures cover the last two seconds, or the whole time if nothing happened.
function drawFigures(totals) {
  const recent = history.slice(-4).map(([, rate]) => rate);
  const mean = (name) => {
    const known = recent.map((rate) => rate[name]).filter((value) => value !== null);
    return known.length ? known.reduce((a, b) => a + b) / known.length : null;
  };
  const uses = totals.hits + totals.misses;
  const asked = totals.device_hits + totals.device_misses;
  $("device-hit-rate").textContent = percent(mean("device") ?? (asked ? totals.device_hits / asked : null));
  $("hit-rate").textContent = percent(mean("hit") ?? (uses ? totals.hits / uses : null));
  $("tokens").textContent = mean("tokens") === null ? "–" : mean("tokens").toFixed(1);
  $("read").textContent = mean("read") === null ? "–" : `${size(mean("read"))}/s`;
  $("stall").textContent = percent(mean("stall"));
  $("recall").textContent = percent(mean("recall") ?? (mean("hit") === null ? totals.recall : null));
  const span = history.length ? Math.max(20, history.at(-1)[0] - history[0][0]) : SPAN;
  $("span").textContent = `Numbers are of the last 2 s, lines of the last ${Math.round(span)} s.`;
  const line = (id, name, most, unit) => drawLine($(id), history.map(([t, rate]) => [t, rate[name]]), span, most, unit);
  const whole = (share) => `${100 * share} %`;
  line("hit-rate-chart", "hit", 1, whole);
  line("device-hit-rate-chart", "device", 1, whole);
  line("tokens-chart", "tokens", null, (n) => n.toFixed(n < 10 ? 1 : 0));
  line("read-chart", "read", null, (n) => `${size(n)}/s`);
  line("stall-chart", "stall", 1, whole);
  line("recall-chart", "recall", 1, whole);
}

function warm(now) {
  heat = now.layers.map((layer, i) => layer.uses.map((n, e) => {
    const before = last?.layers[i]?.uses[e] ?? n;
    return (heat[i]?.[e] ?? Math.min(n, 8)) * FADING + Math.max(0, n - before);
  }));
}

function drawMap(now) {
  const most = Math.max(1, ...heat.map((row) => Math.max(...row)));
  map.draw(now.layers.map((layer, i) => ({ ...layer, heat: heat[i].map((h) => Math.sqrt(h / most)) })));
  describe(now);
}

function describe(now) {
  if (!map.cursor) return;
  const [r, e] = map.cursor;
  const layer = now.layers[r];
  const state = parseInt(layer.states[e], 32);
  const words = [state & RESIDENT ? "in memory" : state & LOADING ? "being read" : "not in memory"];
  if (state & ON_DEVICE) words.unshift("on the device");
  if (state & PINNED) words.push("pinned");
  if (state & IN_USE) words.push("in use");
  const text = `layer ${layer.layer}, expert ${e}: ${words.join(", ")}, used ${layer.uses[e]} times`;
  if ($("cell").textContent !== text) $("cell").textContent = text;
}

function showBudget(settings) {
  const slider = $("budget");
  const { budget, least_budget, most_budget } = settings;
  if (!sliding) slider.value = Math.round((slider.max * (budget - least_budget)) / Math.max(1, most_budget - least_budget));
  budgetText(sliding ? chosenBudget(settings) : budget, most_budget);
}

// The budget in bytes at the slider's position.
function chosenBudget({ least_budget, most_budget }) {
  return Math.round(least_budget + ((most_budget - least_budget) * $("budget").value) / $("budget").max);
}

function budgetText(n, all) {
  const text = `${size(n)} of ${size(all)} (${((100 * n) / all).toFixed(0)} %)`;
  $("budget-text").textContent = text;
  $("budget").setAttribute("aria-valuetext", text);
}

function showSlots(slots) {
  const rows = slots.map((slot) => {
    const tokens = slot.next_token?.[0]?.n_decoded ?? 0;
    const state = !slot.is_processing ? "idle" : tokens ? "answering" : "reading";
    const had = slot.n_prompt_tokens !== undefined;
    return [state, [slot.id, state, had ? slot.n_prompt_tokens_processed + slot.n_prompt_tokens_cache : "–", had ? tokens : "–", ms(slot.t_prompt_ms), ms(slot.t_per_token_ms)]];
  });
  $("slots").replaceChildren(...rows.map(([state, cells]) => {
    const row = document.createElement("tr");
    row.className = state;
    row.append(...cells.map((text) => Object.assign(document.createElement("td"), { textContent: text })));
    return row;
  }));
}

function say(text, kind) {
  if ($("state").textContent !== text) $("state").textContent = text;
  $("state").className = kind;
}

function askForKey(sentence) {
  sessionStorage.removeItem("pyorch-key");
  key = "";
  $("key-error").textContent = sentence;
  $("key-form").hidden = false;
  $("main").hidden = true;
  say("locked", "");
  $("key").focus();
}

async function read() {
  const now = await ask("residency");
  $("key-form").hidden = true;
  $("main").hidden = false;
  show(now);
  if (asksSlots) {
    try {
      showSlots(await ask("slots"));
    } catch (error) {
      if (error instanceof TypeError) throw error;
      asksSlots = false; // the server was started with --no-slots
      document.querySelector(".requests").hidden = true;
    }
  }
  say("live", "live");
}

async function run() {
  if (document.body.dataset.needsKey === "true" && !key) return askForKey("");
  if (!document.hidden) {
    try {
      await read();
    } catch (error) {
      if (error instanceof Refused) return askForKey(error.message);
      say(error instanceof TypeError ? "no connection" : error.message, "lost");
    }
  }
  setTimeout(run, PERIOD_MS);
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value;
  sessionStorage.setItem("pyorch-key", key);
  $("key-error").textContent = "";
  run();
});

$("budget").addEventListener("input", () => {
  sliding = true;
  if (last) budgetText(chosenBudget(last.settings), last.settings.most_budget);
});
$("budget").addEventListener("change", async () => {
  try {
    const now = await ask("residency", { budget: chosenBudget(last.settings) });
    $("budget-error").textContent = "";
    sliding = false;
    show(now);
  } catch (error) {
    $("budget-error").textContent = error.message;
    sliding = false;
  }
});

const point = (event) => {
  const cell = map.at(event.clientX, event.clientY);
  if (cell && last) { map.cursor = cell; drawMap(last); }
};
$("map").addEventListener("pointermove", point);
$("map").addEventListener("pointerdown", point);
$("map").addEventListener("keydown", (event) => {
  if (map.move(event.key) && last) { event.preventDefault(); drawMap(last); }
});
new ResizeObserver(() => last && drawMap(last)).observe($("map"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => last && drawMap(last));

for (const term of document.querySelectorAll(".terms dt")) $(term.dataset.of).title = term.nextElementSibling.textContent;

for (const [style, text] of [["background: var(--absent)", "not in memory"], ["background: var(--loading)", "being read"], ["scale", "in memory, from rarely to often used"], ["device-scale", "on the device, from rarely to often used"], ["background: var(--ink); width: .35em; height: .35em; vertical-align: .15em", "pinned"]]) {
  const item = document.createElement("span");
  const sign = document.createElement("i");
  style.endsWith("scale") ? (sign.className = style) : (sign.style.cssText = style);
  if (style === "device-scale") item.id = "device-legend";
  item.append(sign, text);
  $("legend").append(item);
}

run();

// The live view: polls /residency and /slots twice a second while the page is visible, and draws the changes.

import { ExpertMap, IN_USE, LOADING, ON_DEVICE, PINNED, RESIDENT, drawLine } from "./charts.js";

const PERIOD_MS = 500;
const SPAN = 120; // the longest time that lines show, in seconds
const FADING = 0.93; // factor of the recent uses from one reading to the next
const RECENT = 2; // seconds that figures cover, after which the server is idle
const MODELS_MS = 5000; // from one reading of the list of models to the next

const $ = (id) => document.getElementById(id);
const map = new ExpertMap($("map"), $("labels"));

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
let asked = new URLSearchParams(location.search).get("model") ?? ""; // of several models; "": the one used last
let turn = 0; // counts choices of a model: answers about the one before are dropped
let computed = null; // when tokens were computed last, { at: Date }; null: before the page was opened
let opened = new Date();
let busy = 0; // slots that have a request
let lastRequest = "";

class Refused extends Error {}
class NotLoaded extends Error {}

async function ask(path, body) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (body) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, { headers, method: body ? "POST" : "GET", body: body && JSON.stringify(body), cache: "no-store" });
  if (answer.status === 401) throw new Refused("This key is not accepted.");
  const value = await answer.json();
  if (answer.status === 503) throw new NotLoaded(value.error?.message ?? answer.statusText);
  if (!answer.ok) throw new Error(value.error?.message ?? answer.statusText);
  return value;
}

// The path of a route, of the chosen model.
const pathOf = (path) => (asked ? `${path}?model=${encodeURIComponent(asked)}` : path);
const clock = (date) => date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });

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
    budget: budgetOf(now),
  };
}

// The bytes that experts may take now; null if the server does not say.
const budgetOf = ({ totals, settings }) => totals.budget_bytes ?? settings.budget ?? null;

function show(now) {
  if (last && now.seconds < last.seconds) forget(); // the server has begun again
  if (last && now.seconds > last.seconds) {
    history.push([now.seconds, rates(now, last)]);
    history = history.filter(([t]) => now.seconds - t <= SPAN);
    if (now.totals.tokens > last.totals.tokens) computed = new Date();
  }
  $("model").textContent = now.model;
  document.title = `pyorch · ${now.model}`;
  drawFigures(now);
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

// Forgets the readings of another model, or of a server that ended.
function forget() {
  [last, heat, history, computed, opened, busy, lastRequest] = [null, [], [], null, new Date(), 0, ""];
  map.cursor = null;
}

const isIdle = () => !busy && history.length > 0 && (computed === null || new Date() - computed > 1000 * RECENT);

function drawActivity(totals) {
  const since = computed ? `Idle since ${clock(computed)}` : totals.tokens ? `Idle since before ${clock(opened)}` : "No request yet";
  const text = isIdle() ? `${since}${lastRequest && totals.tokens ? `; last request: ${lastRequest}` : ""}.` :
    busy ? `${busy} ${busy === 1 ? "request" : "requests"} in progress.` : history.length ? "Computing." : "";
  if ($("activity").textContent !== text) $("activity").textContent = text;
}

// Figures cover the last two seconds; of an idle server, hit rates and recall cover the whole time.
function drawFigures(now) {
  const { totals } = now;
  drawActivity(totals);
  const recent = isIdle() ? [] : history.slice(-(1000 * RECENT) / PERIOD_MS).map(([, rate]) => rate);
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
  const budget = budgetOf(now);
  $("of-budget").hidden = budget === null;
  $("budget-now").textContent = budget === null ? "–" : size(budget);
  const span = history.length ? Math.max(20, history.at(-1)[0] - history[0][0]) : SPAN;
  $("span").textContent = `${isIdle() ? "Hit rates and recall are of the whole time" : `Numbers are of the last ${RECENT} s`}, lines of the last ${Math.round(span)} s.`;
  const line = (id, name, most, unit) => drawLine($(id), history.map(([t, rate]) => [t, rate[name]]), span, most, unit);
  const whole = (share) => `${100 * share} %`;
  line("hit-rate-chart", "hit", 1, whole);
  line("device-hit-rate-chart", "device", 1, whole);
  line("tokens-chart", "tokens", null, (n) => n.toFixed(n < 10 ? 1 : 0));
  line("read-chart", "read", null, (n) => `${size(n)}/s`);
  line("stall-chart", "stall", 1, whole);
  line("recall-chart", "recall", 1, whole);
  if (budget !== null) line("budget-chart", "budget", null, size);
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

const HELP = $("cell").textContent;

function describe(now) {
  const [r, e] = map.cursor ?? [];
  if (!now.layers[r]) {
    map.cursor = null;
    if ($("cell").textContent !== HELP) $("cell").textContent = HELP;
    return;
  }
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
  busy = slots.filter((slot) => slot.is_processing).length;
  const latest = slots.reduce((a, b) => ((b.id_task ?? -1) > (a?.id_task ?? -1) ? b : a), null);
  const n = latest?.next_token?.[0]?.n_decoded;
  if (n) lastRequest = `${latest.n_prompt_tokens_processed + latest.n_prompt_tokens_cache} tokens of prompt, ${n} of answer, ${ms(latest.t_per_token_ms)} per token`;
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
  const mine = turn;
  const now = await ask(pathOf("residency"));
  if (mine !== turn) return;
  $("key-form").hidden = true;
  $("main").hidden = false;
  if (asksSlots) {
    try {
      const slots = await ask(pathOf("slots"));
      if (mine !== turn) return;
      showSlots(slots);
    } catch (error) {
      if (error instanceof TypeError || error instanceof NotLoaded) throw error;
      asksSlots = false; // the server was started with --no-slots
      document.querySelector(".requests").hidden = true;
    }
  }
  show(now);
  absent("");
  say("live", "live");
}

// Says why there are no numbers: the model is not loaded, or is dense.
function absent(sentence) {
  if ($("absent").textContent !== sentence) $("absent").textContent = sentence;
  if (!sentence) return;
  $("main").hidden = true;
  $("model").textContent = asked;
  forget();
}

async function run() {
  if (document.body.dataset.needsKey === "true" && !key) return askForKey("");
  const mine = turn;
  if (!document.hidden) {
    try {
      await read();
    } catch (error) {
      if (error instanceof Refused) return askForKey(error.message);
      if (mine !== turn) { /* about another model */ }
      else if (error instanceof TypeError) say("no connection", "lost");
      else {
        absent(`${error.message}.`);
        say(error instanceof NotLoaded ? "not loaded" : "no figures", "");
      }
    }
  }
  setTimeout(run, PERIOD_MS);
}

// Offers the models where there are several.
async function showModels() {
  let n = 0;
  try {
    if (document.hidden) return;
    const { data } = await ask("v1/models");
    n = data.length;
    if (n < 2) return;
    const names = [["", "the model used last"], ...data.map(({ id, status }) => [id, `${id} (${status?.value ?? "?"})`])];
    if (JSON.stringify(names) === $("choice").dataset.names) return; // an open menu would close
    $("choice").dataset.names = JSON.stringify(names);
    $("choice").replaceChildren(...names.map(([value, textContent]) => Object.assign(document.createElement("option"), { value, textContent })));
    $("choice").value = asked;
    $("choice").hidden = false;
  } catch { /* read() tells of a key, or of a lost connection */ } finally {
    if (n !== 1) setTimeout(showModels, MODELS_MS);
  }
}

$("choice").addEventListener("change", () => {
  asked = $("choice").value;
  turn++;
  const place = new URL(location);
  asked ? place.searchParams.set("model", asked) : place.searchParams.delete("model");
  window.history.replaceState(null, "", place);
  forget();
});

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value;
  sessionStorage.setItem("pyorch-key", key);
  $("key-error").textContent = "";
  run();
  showModels();
});

$("budget").addEventListener("input", () => {
  sliding = true;
  if (last) budgetText(chosenBudget(last.settings), last.settings.most_budget);
});
$("budget").addEventListener("change", async () => {
  try {
    const now = await ask(pathOf("residency"), { budget: chosenBudget(last.settings) });
    $("budget-error").textContent = "";
    sliding = false;
    show(now);
  } catch (error) {
    $("budget-error").textContent = error.message;
    sliding = false;
  }
});

// Where the pointer is; a tap also tells a screen reader.
const point = (event) => {
  const cell = map.at(event.clientX, event.clientY);
  if (cell && last) { map.cursor = cell; drawMap(last); }
  if (cell && last && event.type === "click") $("said").textContent = $("cell").textContent;
};
$("map").addEventListener("pointermove", (event) => event.pointerType === "mouse" && point(event));
$("map").addEventListener("click", point);
$("map").addEventListener("keydown", (event) => {
  if (!last) return;
  if (event.key === "Escape") map.cursor = null;
  else if (!map.move(event.key)) return;
  event.preventDefault();
  drawMap(last);
  $("said").textContent = map.cursor ? $("cell").textContent : "";
});
new ResizeObserver(() => last && drawMap(last)).observe(document.querySelector(".map"));
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
if (document.body.dataset.needsKey !== "true" || key) showModels();

// The status page: asks /status.json every second, and shows what it says.

import { Chat } from "./chat.js";
import { Plot } from "./plot.js";
import { drawPages } from "./pages.js";

const INTERVAL = 1000;
const PATIENCE = 6000; // a server that is stopped would be shown as it was, for ever
const ROWS = 11;
const find = (id) => document.getElementById(id);

let key = sessionStorage.getItem("key") || "";
let chosen = "";
let latest = null;
let before = null; // what was shown last of the same model, to tell rates

const headers = () => (key ? { Authorization: `Bearer ${key}` } : {});
const chat = new Chat(headers, () => chosen);
const plots = {
  first: new Plot(find("first"), ["first_p50", "first_p95"], "ms"),
  gap: new Plot(find("gap"), ["gap_p50", "gap_p95"], "ms"),
  tokens: new Plot(find("tokens"), ["tokens"], "tokens/s"),
};

const whole = (number) => Math.round(number).toLocaleString("en-US");
const percent = (share) => `${(100 * share).toFixed(share && share < 0.0995 ? 1 : 0)} %`;
const milliseconds = (ms) => (ms < 10 ? ms.toFixed(1) : whole(ms));

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (count >= 1024 && power < 4) {
    count /= 1024;
    power += 1;
  }
  return `${count < 10 && power ? count.toFixed(2) : count.toFixed(power > 2 ? 1 : 0)} ${units[power]}`;
}

function make(tag, name, text) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  return element;
}

function tell(state, kind = "") {
  find("state").className = `state ${kind}`;
  find("state").lastElementChild.textContent = state;
}

async function ask() {
  const signal = AbortSignal.timeout(PATIENCE);
  const reply = await fetch("status.json", { headers: headers(), cache: "no-store", signal });
  if (reply.status === 401) return openDoor();
  if (!reply.ok) throw new Error(`status ${reply.status}`);
  latest = await reply.json();
  find("door").hidden = true;
  find("board").hidden = false;
  show();
}

function openDoor() {
  find("door-error").textContent = key ? "That is not a key of this server." : "";
  find("door").hidden = false;
  find("board").hidden = true;
  tell("needs a key");
}

async function watch() {
  if (!document.hidden && find("door").hidden) {
    try {
      await ask();
    } catch {
      tell("no answer, trying again", "bad");
    }
  }
  setTimeout(watch, INTERVAL);
}

function show() {
  const names = latest.models.map((model) => model.name);
  if (!names.includes(chosen)) chosen = names[0];
  offer(names);
  const model = latest.models.find((each) => each.name === chosen);
  document.title = `${model.stats.num_running} running · Paged`;
  if (model.trouble) tell(`the engine ${model.trouble}`, "bad");
  else tell("serving", "good");
  for (const part of document.querySelectorAll(".of-text")) part.hidden = !model.generates;
  showFigures(model);
  if (model.generates) showText(model);
  before = { time: latest.time, name: model.name, stats: model.stats };
  find("footer").textContent = `Paged ${latest.version}`;
}

function offer(names) {
  const list = find("models");
  const several = names.length > 1;
  list.hidden = !several;
  find("model").hidden = several;
  find("model").textContent = chosen;
  if (several && list.childElementCount !== names.length) {
    list.replaceChildren(...names.map((name) => new Option(name)));
  }
  list.value = chosen;
}

function showFigures(model) {
  const { stats } = model;
  find("running").textContent = whole(stats.num_running);
  find("waiting").textContent = whole(stats.num_waiting);
  find("rate").textContent = whole(rate(model));
  find("usage").textContent = percent(stats.kv_cache_usage);
  const { prefix_cache_queries: asked, prefix_cache_hits: hits } = stats;
  find("hits").textContent = asked ? percent(hits / asked) : "–";
  find("compiles").textContent = whole(stats.compiles_after_warmup);
}

function rate(model) {
  if (model.generates) return model.history.rate;
  if (!before || before.name !== model.name) return 0;
  const seconds = latest.time - before.time;
  return (model.stats.prompt_tokens - before.stats.prompt_tokens) / Math.max(seconds, 0.001);
}

const newest = (values) => values.findLast((value) => value !== null);

function showText(model) {
  showPages(model);
  showSequences(model);
  showPlots(model);
  showMemory(model);
}

function showPages({ pages, stats }) {
  const size = stats.page_size;
  find("pages-note").textContent = pages
    ? `${whole(stats.num_pages)} of ${size} tokens` +
      (pages.per_cell > 1 ? `, ${pages.per_cell} to a square` : "")
    : "the engine does not answer";
  if (!pages) return;
  drawPages(find("pages"), pages, stats.num_pages);
  const sums = pages.cells.reduce((sum, cell) => sum.map((n, i) => n + cell[i]), [0, 0, 0]);
  const [used, shared, cached] = sums;
  const counts = [used, shared, cached, stats.num_pages - used - shared - cached];
  find("pages-legend").querySelectorAll("b").forEach((each, i) => {
    each.textContent = whole(counts[i]);
  });
}

function showSequences({ sequences, stats }) {
  const total = stats.num_running + stats.num_waiting;
  const found = sequences || [];
  const shown = found.slice(0, found.length > ROWS ? ROWS - 1 : ROWS);
  const rows = shown.map(sequenceRow);
  if (total > shown.length && shown.length) {
    rows.push(make("li", "none", `and ${whole(total - shown.length)} more`));
  }
  if (!rows.length) rows.push(make("li", "none", "None now."));
  find("sequences").replaceChildren(...rows);
  find("sequences-note").textContent = total
    ? `${whole(stats.num_running)} running, ${whole(stats.num_waiting)} waiting`
    : "";
}

function sequenceRow(sequence) {
  const { prompt_tokens: prompt, output_tokens: output, max_tokens: most } = sequence;
  const row = make("li", sequence.status);
  const cached = Math.max(sequence.cached_tokens, 0);
  const computed = Math.max(Math.min(sequence.computed_tokens, prompt) - cached, 0);
  const track = make("span", "track");
  const running = sequence.status === "running";
  const parts = [["hit", running ? cached : 0], ["prompt", computed], ["output", output]];
  for (const [name, tokens] of parts) {
    const part = make("i", name);
    part.style.width = `${(100 * tokens) / (prompt + most)}%`;
    track.append(part);
  }
  const id = make("span", "id", shortId(sequence));
  id.title = `${sequence.request_id}, ${sequence.num_pages} pages`;
  const text = running ? `${whole(prompt)} + ${whole(output)}` : sequence.status;
  row.append(id, track, make("span", "", text));
  return row;
}

// Of ids like chatcmpl-0123456789abcdef...-0 the first digits.
function shortId({ request_id: id, index }) {
  const short = id.replace(/^[a-z]+[-_]/, "").slice(0, 8);
  return index ? `${short}·${index}` : short;
}

function showPlots({ history }) {
  for (const plot of Object.values(plots)) plot.draw(history);
  for (const name of ["first", "gap"]) {
    const [middle, high] = ["p50", "p95"].map((each) => newest(history[`${name}_${each}`]));
    find(`${name}-now`).textContent = middle ? milliseconds(middle) : "–";
    find(`${name}-high`).textContent = high ? `· 95 % below ${milliseconds(high)}` : "";
  }
  find("tokens-now").textContent = whole(history.rate);
}

function showMemory({ num_devices: devices, memory, startup, steps, host_ms: host }) {
  const parts = Object.entries(memory);
  const total = parts.reduce((sum, [, size]) => sum + size, 0);
  const each = devices > 1 ? ` on each of ${devices} devices` : "";
  find("memory-note").textContent = `${bytes(total)}${each}, divided at the start`;
  const classOf = (i) => `m${Math.min(i, 5)}`;
  find("memory-bar").replaceChildren(...parts.map(([, size], i) => {
    const part = make("i", classOf(i));
    part.style.flexGrow = size / total;
    return part;
  }));
  find("memory-legend").replaceChildren(...parts.map(([name, size], i) => {
    const entry = make("li", classOf(i), `${name} `);
    entry.append(make("b", "", bytes(size)));
    return entry;
  }));
  const long = Object.entries(startup).filter(([, s]) => s >= 0.05);
  const phases = long.map(([name, s]) => `${name} ${s.toFixed(1)} s`);
  const busiest = steps.reduce((a, b) => (a && a.count >= b.count ? a : b), null);
  const step = busiest
    ? ` Most steps were of the shape ${busiest.bucket}: ${milliseconds(busiest.ms)} ms, ` +
      `with ${host.toFixed(2)} ms of the host.`
    : "";
  find("startup").textContent = (phases.length ? `Start: ${phases.join(", ")}.` : "") + step;
}

// A link carries no key: where one is needed, it would lead to a refusal.
async function hideClosed() {
  for (const link of document.querySelectorAll("nav a")) {
    const reply = await fetch(link.href, { method: "HEAD" });
    link.hidden = reply.status === 401;
  }
}

find("door").addEventListener("submit", async (event) => {
  event.preventDefault();
  const given = find("key").value.trim();
  if (/[^\x20-\xff]/.test(given)) {
    find("door-error").textContent = "That is no key: no header can carry it.";
    return;
  }
  key = given;
  sessionStorage.setItem("key", key);
  hideClosed().catch(() => {});
  try {
    await ask();
  } catch {
    find("door-error").textContent = "The server does not answer.";
  }
});
find("models").addEventListener("change", (event) => {
  chosen = event.target.value;
  chat.clear();
  show();
});
window.addEventListener("resize", () => latest && find("door").hidden && show());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => latest && show());

if (key) hideClosed().catch(() => {});
watch();

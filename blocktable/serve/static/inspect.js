"use strict";
/* The inspector's page. State is one Int32Array of block codes and a list of frames; each frame
   holds old and new codes, so the cursor moves through time in both directions. The map is drawn
   one pixel a block into an image and scaled up, so 100,000 blocks cost what 100 cost. */

const KINDS = ["free", "cached", "fenced", "owned", "shared"];
const COLOURS = {}; // of the page's scheme, from its style sheet
const MAX_FRAMES = 20000, MAX_REQUESTS = 4000, LISTED = 120, CHIPS = 512, WINDOW = 1200, LAST_TOKENS = 400;
const $ = (id) => document.getElementById(id);
const key = new URLSearchParams(location.search).get("key");
const url = (path) => "inspect/" + path + (key ? (path.includes("?") ? "&" : "?") + "key=" + encodeURIComponent(key) : "");

const S = {
  codes: new Int32Array(0), frames: [], cursor: 0, live: true, blockSize: 0, requests: new Map(),
  columns: 1, cell: 1, tall: 1, chosen: -1, dirty: true, tab: "requests", sequence: 0, window: 0, model: "",
  events: false, // over another engine's events: no requests, rows, hits or slots are known
  shown: null, // what the tab Detail shows: {block, code} or {request, rows, hit, ended}
};

/* ---- colours ---- */
function hue(number) { return (number * 137.508) % 360; }
function toRgb(h, s, l) {
  const a = s * Math.min(l, 1 - l);
  const f = (n) => { const k = (n + h / 30) % 12; return Math.round(255 * (l - a * Math.max(-1, Math.min(k - 3, 9 - k, 1)))); };
  return [f(0), f(8), f(4)];
}
const parse = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
let FIXED = [];
function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["free", "cached", "fenced", "shared", "owned", "back", "panel", "cursor", "bad"]) COLOURS[name] = style.getPropertyValue("--" + name).trim();
  FIXED = KINDS.map((kind) => parse(COLOURS[kind]));
}
readColours();
matchMedia("(prefers-color-scheme: light)").addEventListener("change", () => { readColours(); layout(); });
const owners = new Map();
function ownerRgb(number) {
  let rgb = owners.get(number);
  if (!rgb) { if (owners.size > MAX_REQUESTS) owners.clear(); rgb = toRgb(hue(number), 0.62, 0.45 + 0.14 * (number % 3)); owners.set(number, rgb); }
  return rgb;
}
const css = (rgb) => `rgb(${rgb[0]},${rgb[1]},${rgb[2]})`;
const kindOf = (code) => code & 7, refsOf = (code) => (code >> 3) & 255, numberOf = (code) => code >>> 11;
const ink = (rgb) => (rgb[0] * 0.3 + rgb[1] * 0.59 + rgb[2] * 0.11 > 120 ? "#10131a" : "#ffffff");
function rgbOf(code) { return kindOf(code) === 3 ? ownerRgb(numberOf(code)) : FIXED[kindOf(code)]; }
function describe(code) {
  const kind = kindOf(code), number = numberOf(code);
  if (kind === 3) return `owned by ${name(number)}`;
  if (kind === 4) return `shared by ${refsOf(code)} rows`;
  if (kind === 1) return (S.events ? "cached" : "cached, free to take") + (number ? ` (from ${name(number)})` : "");
  return KINDS[kind];
}
function name(number) { const r = S.requests.get(number); return r ? r.id : number ? "#" + number : "nobody"; }

/* ---- the map ---- */
const map = $("map"), off = document.createElement("canvas");
let image = null;
function layout() {
  const box = $("mapbox").getBoundingClientRect(), ratio = window.devicePixelRatio || 1;
  const width = Math.max(1, Math.floor(box.width * ratio)), height = Math.max(1, Math.floor(box.height * ratio));
  const count = Math.max(1, S.codes.length);
  let cell = Math.max(1, Math.floor(Math.sqrt(width * height / count)));
  while (cell > 1 && Math.ceil(count / Math.floor(width / cell)) * cell > height) cell--;
  // more blocks than pixels: several blocks a pixel, which shows their mean
  while (cell <= 1 && Math.ceil(count / Math.floor(width / cell)) * cell > height) cell *= 0.98;
  cell = Math.min(cell, Math.round(40 * ratio));
  S.cell = cell; S.ratio = ratio;
  S.columns = Math.max(1, Math.floor(width / cell));
  S.rows = Math.ceil(count / S.columns);
  // whole pixels leave much of the height unused where cells are small: they may be taller than wide
  S.tall = cell < 1 ? cell : Math.max(cell, Math.min(Math.floor(height / S.rows), 2 * cell, Math.round(40 * ratio)));
  map.width = width; map.height = height;
  off.width = S.columns; off.height = S.rows;
  image = off.getContext("2d").createImageData(S.columns, S.rows);
  for (let b = 0; b < S.columns * S.rows; b++) paint(b);
  S.dirty = true;
}
function paint(block) {
  const at = block * 4, data = image.data;
  const rgb = block >= S.codes.length ? parse(COLOURS.panel) : block === 0 ? parse(COLOURS.back) : rgbOf(S.codes[block]);
  data[at] = rgb[0]; data[at + 1] = rgb[1]; data[at + 2] = rgb[2]; data[at + 3] = 255;
}
function drawMap() {
  const ctx = map.getContext("2d"), cell = S.cell, tall = S.tall;
  off.getContext("2d").putImageData(image, 0, 0);
  ctx.imageSmoothingEnabled = cell < 1;
  ctx.fillStyle = COLOURS.panel; ctx.fillRect(0, 0, map.width, map.height);
  ctx.drawImage(off, 0, 0, S.columns * cell, S.rows * tall);
  if (cell >= 6) {
    ctx.fillStyle = COLOURS.panel;
    for (let x = 0; x <= S.columns; x++) ctx.fillRect(x * cell, 0, 1, S.rows * tall);
    for (let y = 0; y <= S.rows; y++) ctx.fillRect(0, y * tall, S.columns * cell, 1);
  }
  if (cell >= 14) labels(ctx);
  for (const block of S.chosen >= 0 ? [S.chosen] : []) {
    ctx.strokeStyle = COLOURS.cursor; ctx.lineWidth = 2;
    ctx.strokeRect((block % S.columns) * cell, Math.floor(block / S.columns) * tall, Math.max(cell, 4), Math.max(tall, 4));
  }
}
function labels(ctx) {
  ctx.font = `${Math.floor(S.cell * 0.5)}px system-ui`; ctx.textAlign = "center"; ctx.textBaseline = "middle";
  for (let b = 1; b < S.codes.length; b++) {
    if (kindOf(S.codes[b]) !== 4) continue;
    ctx.fillStyle = ink(FIXED[4]);
    ctx.fillText(refsOf(S.codes[b]), ((b % S.columns) + 0.5) * S.cell, (Math.floor(b / S.columns) + 0.5) * S.tall);
  }
}
function blockAt(event) {
  const box = map.getBoundingClientRect();
  const x = Math.floor((event.clientX - box.left) * S.ratio / S.cell), y = Math.floor((event.clientY - box.top) * S.ratio / S.tall);
  const block = y * S.columns + x;
  return x < S.columns && block < S.codes.length ? block : -1;
}

/* ---- time ---- */
function apply(frame, direction) {
  const b = frame.b;
  let most = 0;
  for (let i = 0; i < b.length; i += 3) most = Math.max(most, b[i]);
  if (most >= S.codes.length) grow(most);
  for (let i = 0; i < b.length; i += 3) {
    S.codes[b[i]] = direction > 0 ? b[i + 2] : b[i + 1];
    if (image) paint(b[i]);
  }
  if (direction > 0) for (const a of frame.a) S.requests.has(a[0]) || S.requests.set(a[0], { number: a[0], id: a[1], prompt: a[3], cached: a[4], row: a[2] });
  S.dirty = true;
}
function grow(block) {
  let size = Math.max(S.codes.length, 1);
  while (size <= block) size *= 2;
  const codes = new Int32Array(size);
  codes.set(S.codes); S.codes = codes;
  layout();
}
function status(text, bad) { $("status").textContent = text; $("status").className = bad ? "bad" : ""; }
function connected(notice) { // or what whoever looks must know
  status(notice && notice.text ? notice.text + (notice.time ? " at " + clock(notice.time) : "") : "connected", Boolean(notice && notice.text));
}
function moveTo(position) { // the state after frames[0 .. position - 1]
  position = Math.max(0, Math.min(position, S.frames.length));
  while (S.cursor < position) apply(S.frames[S.cursor++], 1);
  while (S.cursor > position) apply(S.frames[--S.cursor], -1);
  S.dirty = true;
}
function add(frames) { // false where frames between were missed: what the page shows would be wrong
  for (const frame of frames) {
    if (frame.n <= S.sequence) continue;
    if (frame.n !== S.sequence + 1) return false;
    S.sequence = frame.n; S.frames.push(frame); index(frame);
  }
  if (S.live) moveTo(S.frames.length);
  forgetRequests();
  const drop = S.frames.length - MAX_FRAMES;
  if (drop > 0 && (S.live || drop > MAX_FRAMES)) { // a paused page keeps twice as many
    if (S.cursor < drop) moveTo(drop);
    S.frames.splice(0, drop); S.cursor -= drop; S.window = Math.max(0, S.window - drop);
  }
  S.dirty = true;
  return true;
}
function forgetRequests() { // the oldest that ended; the server forgets them too
  let drop = S.requests.size - MAX_REQUESTS;
  if (drop > MAX_REQUESTS / 8) for (const [number, r] of S.requests) {
    if (drop <= 0) break;
    if (r.to !== undefined || r.ended) { S.requests.delete(number); drop--; }
  }
}
function index(frame) {
  for (const a of frame.a) S.requests.set(a[0], { number: a[0], id: a[1], row: a[2], prompt: a[3], cached: a[4], from: frame.n });
  for (const e of frame.e) { const r = S.requests.get(e[0]); if (r) { r.to = frame.n; r.reason = e[1]; } }
}
function setLive(on) {
  S.live = on;
  $("live").setAttribute("aria-pressed", String(on));
  if (on) moveTo(S.frames.length);
}

/* ---- drawing the rest ---- */
function current() { return S.frames[S.cursor - 1]; }
function drawNumbers(counts) {
  const usable = S.codes.length - 1, frame = current(), size = S.blockSize;
  $("model").textContent = S.events ? S.model : `${S.model}, ${usable.toLocaleString("en")} blocks of ${size} token${size === 1 ? "" : "s"}`;
  $("legend").innerHTML = "";
  for (const kind of ["owned", "shared", "cached", "fenced", "free"]) {
    const span = document.createElement("span"), mark = document.createElement("i");
    mark.style.background = COLOURS[kind]; span.append(mark, `${kind === "owned" ? "owned (a colour a request)" : kind} ${counts[KINDS.indexOf(kind)].toLocaleString("en")}`);
    $("legend").append(span);
  }
  $("scrub").max = S.frames.length; $("scrub").value = S.cursor;
  if (!frame) { $("when").value = S.frames.length ? "before the first recorded step" : "nothing recorded yet"; $("numbers").textContent = ""; return; }
  const [used, , cached, , running, waiting] = frame.c;
  $("numbers").innerHTML = S.events ? `batch <b>${frame.s.toLocaleString("en")}</b> &nbsp; <b>${cached.toLocaleString("en")}</b> blocks cached` :
    `step <b>${frame.s.toLocaleString("en")}</b> &nbsp; running <b>${running}</b> &nbsp; waiting <b>${waiting}</b> &nbsp; blocks <b>${used.toLocaleString("en")}</b> of ${usable.toLocaleString("en")} held`;
  $("when").value = new Date(frame.t * 1000).toLocaleTimeString("en-GB") + "." + String(Math.floor(frame.t * 1000) % 1000).padStart(3, "0") + (S.live ? " live" : "");
}
function census() {
  const counts = [0, 0, 0, 0, 0], held = new Map();
  for (let b = 1; b < S.codes.length; b++) {
    const code = S.codes[b], kind = kindOf(code);
    counts[kind]++;
    if (kind === 3) held.set(numberOf(code), (held.get(numberOf(code)) || 0) + 1);
  }
  return [counts, held];
}
function escape(text) { return String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" }[c])); }
function drawRequests(held) {
  const at = current() ? current().n : 0, rows = [];
  for (const r of S.requests.values()) {
    if (r.from !== undefined && r.from > at) continue;
    const gone = Boolean(r.to !== undefined ? r.to <= at : r.ended);
    rows.push([gone, r]);
  }
  rows.sort((a, b) => a[0] - b[0] || b[1].number - a[1].number);
  $("requests").innerHTML = rows.slice(0, LISTED).map(([gone, r]) => {
    const share = r.prompt ? Math.round(100 * r.cached / r.prompt) : 0;
    const state = gone ? r.reason || "ended" : `row ${r.row}, ${held.get(r.number) || 0} blocks of its own`;
    return `<div class="req${gone ? " gone" : ""}" data-request="${r.number}"><i style="background:${css(ownerRgb(r.number))}"></i>` +
      `<span>${escape(r.id)}</span><span>${r.prompt} tokens</span><div class="bar"><div style="width:${share}%"></div></div>` +
      `<small>${state}; ${r.cached} of the prompt were hit (${share}%)</small></div>`;
  }).join("") + (rows.length > LISTED ? `<p class="hint">and ${(rows.length - LISTED).toLocaleString("en")} more</p>` : "") || '<p class="hint">No requests yet.</p>';
}
function shownFrames() { // first and number of the frames in the timelines: the last ones, or around the cursor
  const count = Math.min(S.frames.length, WINDOW), last = S.frames.length - count;
  if (S.live) S.window = last;
  else if (S.cursor <= S.window || S.cursor > S.window + count) S.window = S.cursor - Math.floor(count / 2);
  S.window = Math.max(0, Math.min(S.window, last));
  return [S.window, count];
}
function heights(series, first, count, step) { // of each bar, for each series: the largest of its frames
  const bars = Math.ceil(count / step), out = series.map(() => new Float64Array(bars));
  for (let i = 0; i < count; i++) series.forEach((s, k) => { const bar = Math.floor(i / step); out[k][bar] = Math.max(out[k][bar], s.of(S.frames[first + i])); });
  return out;
}
function topOf(found) { // a few steps far above all others are cut, so that the others can be seen
  const sums = found[0].map((_, i) => found.reduce((sum, values) => sum + values[i], 0)).filter((v) => v > 0).sort();
  return sums.length ? Math.min(sums[sums.length - 1], 4 * sums[Math.floor(sums.length * 0.9)]) : 1;
}
function chart(id, series, options) {
  const canvas = $(id), ratio = window.devicePixelRatio || 1, box = canvas.getBoundingClientRect();
  canvas.width = Math.max(1, box.width * ratio); canvas.height = Math.max(1, box.height * ratio);
  const ctx = canvas.getContext("2d"), width = canvas.width, height = canvas.height;
  const [first, count] = shownFrames();
  canvas.dataset.first = first; canvas.dataset.count = count;
  if (!count) return;
  const step = Math.max(1, Math.ceil(count / width)), found = heights(series, first, count, step), top = options.top || topOf(found);
  const at = (i) => Math.round(Math.min(i, count) / count * width); // whole pixels: no stripes between bars
  for (let bar = 0; bar < found[0].length; bar++) {
    const x = at(bar * step), w = Math.max(1, at((bar + 1) * step) - x);
    let base = height;
    series.forEach((s, k) => {
      const h = Math.min(found[k][bar] / top * (height - 2), base);
      ctx.fillStyle = s.colour; ctx.fillRect(x, base - h, w, h); base -= h;
    });
  }
  ctx.fillStyle = COLOURS.bad; // what was lost before a frame
  for (let i = 0; i < count; i++) if (S.frames[first + i].m) ctx.fillRect(at(i), 0, 2, height);
  if (S.cursor) { ctx.fillStyle = COLOURS.cursor; ctx.fillRect(Math.min(at(S.cursor - first - 0.5), width - 1.5), 0, 1.5, height); }
}
function drawCharts() {
  const usable = S.codes.length - 1, frame = current();
  chart("use", [{ of: (f) => f.c[0], colour: COLOURS.owned }, { of: (f) => f.c[3], colour: COLOURS.fenced }, { of: (f) => f.c[2], colour: COLOURS.cached }], { top: usable });
  chart("tok", [{ of: (f) => f.c[7] / f.k, colour: "#57c785" }, { of: (f) => Math.max(0, f.c[6] - f.c[7]) / f.k, colour: "#b48ead" }], {});
  chart("hit", [{ of: (f) => f.c[8], colour: COLOURS.shared }, { of: (f) => f.c[9] * 20, colour: "#ff7b72" }], {});
  chart("time", [{ of: (f) => f.d / f.k, colour: "#d6b35a" }], {});
  if (!frame) { for (const id of ["use", "tok", "hit", "time"]) $(id + "value").textContent = ""; return; }
  $("usevalue").textContent = S.events ? `${frame.c[2].toLocaleString("en")} cached` : `${frame.c[0].toLocaleString("en")} held, ${frame.c[2].toLocaleString("en")} cached`;
  $("tokvalue").textContent = `${Math.round(frame.c[7] / frame.k)} decoded, ${Math.round(Math.max(0, frame.c[6] - frame.c[7]) / frame.k)} prefill`;
  $("hitvalue").textContent = `${frame.c[8]} hit, ${frame.c[9]} preempted`;
  $("timevalue").textContent = `${(frame.d / frame.k * 1000).toFixed(1)} ms`;
}
let lastPanels = 0, pressed = false;
let drawing = 0; // milliseconds that the last drawings took, smoothed
function tick(now) {
  if (S.dirty && image) {
    S.dirty = false;
    const begin = performance.now();
    drawMap();
    if (now - lastPanels > 180) { panels(); lastPanels = now; } else setTimeout(() => { S.dirty = true; }, 200);
    drawing += 0.1 * (performance.now() - begin - drawing);
  }
  requestAnimationFrame(tick);
}
function panels() {
  const [counts, held] = census();
  drawNumbers(counts); drawCharts();
  if (S.tab === "requests" && !pressed) drawRequests(held);
  if (S.tab === "detail") colourRows();
}

/* ---- details ---- */
function openTab(tab) {
  S.tab = tab;
  for (const b of document.querySelectorAll("#tabs button")) b.setAttribute("aria-selected", String(b.dataset.tab === tab));
  for (const d of document.querySelectorAll(".tab")) d.hidden = d.id !== tab;
  if (tab === "tree") loadTree();
  S.dirty = true;
}
const clock = (t) => new Date(t * 1000).toLocaleTimeString("en-GB");
function verb(old, now) {
  const a = kindOf(old), b = kindOf(now);
  if (b === 3 && a < 3) return a === 1 && numberOf(old) !== numberOf(now) ? `taken by ${name(numberOf(now))} (what was cached is evicted or hit)` : `taken by ${name(numberOf(now))}`;
  if (b === 4) return refsOf(now) > refsOf(old) ? `shared, now by ${refsOf(now)}` : `one row less, now ${refsOf(now)}`;
  if (b === 3 && a === 4) return `only ${name(numberOf(now))} is left`;
  if (b === 1) return S.events ? "stored" : "released, kept in the cache";
  if (b === 2) return "released, fenced until the step is done";
  if (b === 0) return a === 1 ? (S.events ? "removed" : "its key was dropped") : "released";
  return describe(now);
}
let asked = 0;
async function ask(path) { // null where something else was asked for meanwhile
  const mine = ++asked, answer = await fetch(url(path)), facts = answer.ok ? await answer.json() : {};
  return mine === asked ? [answer.ok, facts] : null;
}
async function showBlock(block) {
  S.chosen = block; S.dirty = true; openTab("detail");
  const code = S.codes[block], answer = await ask("block/" + block);
  if (!answer || !answer[0]) return;
  S.shown = { block, code };
  $("detail").innerHTML = block === 0 ? nullHtml(answer[1]) : blockHtml(answer[1]);
}
function nullHtml(f) {
  return `<h3>block 0 (null block)</h3><table><tr><th>slots</th><td>${f.slots[0]} to ${f.slots[1]}</td></tr></table>` +
    '<p class="hint">Reserved: it is never handed out and no token is written to it. Unused entries of a row are 0.</p>';
}
const LIVES = 200;
function blockHtml(f) {
  const life = f.life.slice(-LIVES).reverse().map((e) => `<tr><th>step ${e.step}</th><th>${clock(e.time)}</th><td>${escape(verb(e.old, e.new))}</td></tr>`).join("");
  const older = f.life.length > LIVES ? `<p class="hint">and ${f.life.length - LIVES} earlier changes</p>` : "";
  const whose = ["last held by", "last held by", "last held by", "held by", "last held alone by"][kindOf(f.code)];
  const filled = f.index >= 0 ? `<tr><th>${whose}</th><td>${escape(f.request || "a request no longer remembered")}, entry ${f.index} of its row</td></tr>` +
    `<tr><th>before it</th><td>${f.parent ? "block " + f.parent : "nothing, it is the first"}</td></tr>` : "";
  return `<h3>block ${f.block}</h3><table>` +
    (S.live ? "" : `<tr><th>at this step</th><td>${escape(describe(S.codes[f.block]))}</td></tr>`) +
    `<tr><th>now</th><td>${escape(describe(f.code))}</td></tr>` +
    (S.events ? `<tr><th>before it</th><td>${f.parent ? "block " + f.parent : "nothing, it is the first"}</td></tr></table><p class="hint">Events name blocks by hash; the number is this page's own.</p>`
      : `<tr><th>references</th><td>${refsOf(f.code)}</td></tr><tr><th>slots</th><td>${f.slots[0]} to ${f.slots[1]}</td></tr>${filled}<tr><th>hits</th><td>${f.hits}</td></tr></table>`) +
    (f.tokens.length ? `<pre>${escape(f.text)}</pre><p class="hint">tokens ${f.tokens.join(" ")}</p>` : "") +
    `<h3>its life</h3><table id="life">${life || "<tr><td>nothing in the recorded time</td></tr>"}</table>${older}`;
}
async function showRequest(number) {
  openTab("detail");
  const answer = await ask("request/" + number);
  if (!answer) return;
  const [known, f] = answer, hit = Math.floor((f.cached || 0) / S.blockSize);
  S.shown = { request: number, rows: f.rows || [], hit, ended: !known || Boolean(f.ended && f.reason !== "preempted") };
  $("detail").innerHTML = known ? requestHtml(f, hit) : '<p class="hint">This request is no longer remembered.</p>';
  colourRows(); // at once: a row that is looked at anew every second must not flicker
}
function requestHtml(f, hit) {
  const many = (n) => n.toLocaleString("en");
  const rows = f.rows.map((row, g) => `<p class="hint">${f.rows.length > 1 ? `group ${g}: ` : ""}row ${f.row}, ${many(row.length)} blocks${hit ? `; the first ${many(hit)} were hit` : ""}</p>` +
    (row.length > CHIPS ? `<p class="hint entry" data-group="${g}">Point at an entry.</p><canvas class="rowmap" data-group="${g}" aria-label="all entries of the row; click one to see its block"></canvas>`
      : `<div class="row" data-group="${g}">${row.map((b) => `<span data-block="${b}">${b}</span>`).join("")}</div>`)).join("");
  return `<h3>${escape(f.id)}</h3><table><tr><th>prompt</th><td>${many(f.prompt)} tokens, ${many(f.cached)} hit (${many(hit)} blocks)</td></tr>` +
    `<tr><th>length now</th><td>${many(f.length)} tokens</td></tr><tr><th>state</th><td>${escape(f.ended ? f.reason : "running since " + clock(f.started))}</td></tr></table>` +
    (rows || '<p class="hint">It holds no row any more.</p>') + (f.length > LAST_TOKENS ? `<p class="hint">its last ${LAST_TOKENS} tokens</p>` : "") + `<pre>${escape(f.text)}</pre>`;
}

/* ---- a request's row: a chip an entry, and a map where that would be too many ---- */
function entryRgb(row, i) { return i < S.shown.hit ? FIXED[4] : rgbOf(S.codes[row[i]] || 0); }
function colourRows() {
  if (!S.shown || !S.shown.rows) return;
  for (const box of document.querySelectorAll("#detail .row")) {
    const row = S.shown.rows[box.dataset.group];
    [...box.children].forEach((chip, i) => {
      const rgb = entryRgb(row, i);
      chip.style.background = css(rgb); chip.style.color = ink(rgb); chip.title = `entry ${i}: ${describe(S.codes[row[i]])}`;
    });
  }
  for (const canvas of document.querySelectorAll("#detail .rowmap")) drawRowMap(canvas, S.shown.rows[canvas.dataset.group]);
}
function drawRowMap(canvas, row) {
  const ratio = window.devicePixelRatio || 1, width = Math.max(1, canvas.clientWidth);
  const tall = () => Math.ceil(row.length / Math.floor(width / cell)) * cell;
  let cell = 12; // as large as lets the whole row be seen at once, while it can be pointed at
  while (cell > 3 && tall() > window.innerHeight / 2 || cell > 1 && tall() > 1600) cell--;
  const columns = Math.max(1, Math.floor(width / cell)), lines = Math.ceil(row.length / columns);
  canvas.style.height = lines * cell + "px"; canvas.dataset.cell = cell; canvas.dataset.columns = columns;
  canvas.width = width * ratio; canvas.height = lines * cell * ratio;
  const small = document.createElement("canvas"), ctx = canvas.getContext("2d"), size = cell * ratio;
  small.width = columns; small.height = lines;
  const pixels = small.getContext("2d").createImageData(columns, lines);
  for (let i = 0; i < row.length; i++) { const rgb = entryRgb(row, i); pixels.data.set([rgb[0], rgb[1], rgb[2], 255], i * 4); }
  small.getContext("2d").putImageData(pixels, 0, 0);
  ctx.imageSmoothingEnabled = false; ctx.drawImage(small, 0, 0, columns * size, lines * size);
  if (cell >= 8) {
    ctx.fillStyle = COLOURS.panel;
    for (let x = 0; x <= columns; x++) ctx.fillRect(x * size, 0, 1, canvas.height);
    for (let y = 0; y <= lines; y++) ctx.fillRect(0, y * size, canvas.width, 1);
  }
}
function entryAt(canvas, event) { // its index in the row, or -1
  const box = canvas.getBoundingClientRect(), cell = Number(canvas.dataset.cell), columns = Number(canvas.dataset.columns);
  const x = Math.floor((event.clientX - box.left) / cell), entry = Math.floor((event.clientY - box.top) / cell) * columns + x;
  return x < columns && entry < S.shown.rows[canvas.dataset.group].length ? entry : -1;
}
function refreshDetail() { // what is shown goes on while the page is live; not under the user's hands
  if (S.tab !== "detail" || !S.live || !S.shown || pressed || document.hidden || !getSelection().isCollapsed) return;
  if (S.shown.request !== undefined && !S.shown.ended) showRequest(S.shown.request);
  if (S.shown.block !== undefined && S.shown.code !== S.codes[S.shown.block]) showBlock(S.shown.block);
}
async function loadTree() {
  const answer = await fetch(url("tree"));
  if (!answer.ok) return;
  const nodes = await answer.json();
  if (pressed) return;
  $("tree").innerHTML = nodes.map((n) => `<div class="node" data-block="${n.block}" style="padding-left:${n.depth * 16}px" title="${escape(n.text)}">` +
    `<b>${n.blocks}</b> block${n.blocks > 1 ? "s" : ""}${S.events ? "" : `, <b>${n.hits}</b> hit${n.hits === 1 ? "" : "s"}, ${n.refs} row${n.refs === 1 ? "" : "s"}`} <code>${escape(n.text.replace(/\s+/g, " "))}</code></div>`).join("") + (nodes.length >= 400 ? '<p class="hint">and more</p>' : "") || '<p class="hint">Nothing is cached.</p>';
}

/* ---- events ---- */
// a list that is drawn anew between press and release swallows the click
document.addEventListener("pointerdown", () => { pressed = true; });
for (const end of ["pointerup", "pointercancel"]) document.addEventListener(end, () => setTimeout(() => { pressed = false; S.dirty = true; }, 0));
map.addEventListener("mousemove", (event) => {
  const block = blockAt(event), tip = $("tip");
  tip.hidden = block < 0;
  if (block < 0) return;
  tip.textContent = `block ${block}: ${block === 0 ? "null block" : describe(S.codes[block])}`;
  const box = $("pool").getBoundingClientRect();
  tip.style.left = Math.min(event.clientX - box.left + 14, box.width - 260) + "px"; tip.style.top = event.clientY - box.top + 14 + "px";
});
map.addEventListener("mouseleave", () => { $("tip").hidden = true; });
map.addEventListener("click", (event) => { const block = blockAt(event); if (block >= 0) showBlock(block); });
map.addEventListener("keydown", (event) => {
  const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -S.columns, ArrowDown: S.columns }[event.key];
  if (move === undefined) return;
  event.preventDefault();
  showBlock(Math.max(0, Math.min(S.codes.length - 1, Math.max(S.chosen, 0) + move)));
});
document.addEventListener("click", (event) => {
  const request = event.target.closest("[data-request]"), block = event.target.closest("[data-block]"), tab = event.target.closest("[data-tab]");
  if (event.target.matches(".rowmap")) { const entry = entryAt(event.target, event); if (entry >= 0) showBlock(S.shown.rows[event.target.dataset.group][entry]); }
  else if (tab) openTab(tab.dataset.tab);
  else if (request) showRequest(Number(request.dataset.request));
  else if (block) showBlock(Number(block.dataset.block));
});
$("live").addEventListener("click", () => setLive(!S.live));
$("back").addEventListener("click", () => { setLive(false); moveTo(S.cursor - 1); });
$("forward").addEventListener("click", () => { setLive(false); moveTo(S.cursor + 1); });
$("scrub").addEventListener("input", (event) => { setLive(false); moveTo(Number(event.target.value)); });
for (const id of ["use", "tok", "hit", "time"]) $(id).addEventListener("click", (event) => {
  const box = event.target.getBoundingClientRect(), data = event.target.dataset;
  setLive(false); moveTo(Number(data.first) + Math.round((event.clientX - box.left) / box.width * Number(data.count)) + 1);
});
document.addEventListener("keydown", (event) => {
  if (event.target.closest("input, canvas, button")) return;
  if (event.key === " ") { event.preventDefault(); setLive(!S.live); }
  if (event.key === "ArrowLeft") $("back").click();
  if (event.key === "ArrowRight") $("forward").click();
});
new ResizeObserver(() => { layout(); }).observe($("mapbox"));
setInterval(() => { if (S.tab === "tree" && S.live) loadTree(); }, 2000);
setInterval(refreshDetail, 1000);
$("detail").addEventListener("mousemove", (event) => {
  if (!event.target.matches(".rowmap")) return;
  const group = event.target.dataset.group, row = S.shown.rows[group], entry = entryAt(event.target, event);
  $("detail").querySelector(`.entry[data-group="${group}"]`).textContent = entry < 0 ? "Point at an entry." : `entry ${entry.toLocaleString("en")}: block ${row[entry]}, ${entry < S.shown.hit ? "hit, " : ""}${describe(S.codes[row[entry]])}`;
});

async function start() {
  const answer = await fetch(url("state"));
  if (!answer.ok) throw new Error(`state: ${answer.status}`);
  const state = await answer.json();
  S.codes = Int32Array.from(state.codes); S.blockSize = state.block_size;
  const before = S.live ? undefined : current();
  S.requests.clear();
  for (const r of state.requests) S.requests.set(r.number, r);
  S.frames = state.frames; S.cursor = S.frames.length; S.sequence = state.sequence;
  if (S.chosen >= S.codes.length) S.chosen = -1;
  for (const frame of S.frames) for (const a of frame.a) { const r = S.requests.get(a[0]); if (r) r.from = frame.n; }
  for (const frame of S.frames) for (const e of frame.e) { const r = S.requests.get(e[0]); if (r) { r.to = frame.n; r.reason = e[1]; } }
  S.model = state.model; S.events = Boolean(state.events);
  document.body.classList.toggle("events", S.events);
  if (S.events && S.tab === "requests") openTab("tree");
  layout();
  const same = before ? S.frames.findIndex((f) => f.n === before.n && f.t === before.t) : -1;
  if (same >= 0) moveTo(same + 1); // a page that was paused stays where it was
  listen(state.sequence, state.notice);
}
function listen(since, notice) {
  const source = new EventSource(url("events?since=" + since));
  source.onopen = () => connected(notice);
  source.addEventListener("notice", (message) => connected(JSON.parse(message.data)));
  source.onmessage = (message) => { if (!add(JSON.parse(message.data))) { source.close(); start().catch(listenLater); } };
  source.onerror = () => {
    source.close(); status("connection lost, trying again", true);
    setTimeout(() => start().catch(() => listenLater()), 1000);
  };
}
function listenLater() { setTimeout(() => start().catch(listenLater), 2000); }
start().catch((error) => { status(String(error), true); listenLater(); });
requestAnimationFrame(tick);
window.inspector = { S, moveTo, setLive, showBlock, showRequest, add, layout, drawing: () => drawing };

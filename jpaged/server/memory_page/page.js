// Draws the pool of a jpaged engine from the messages of memory/events; feed.py defines them.

const STATES = ["none", "empty", "cached", "used", "shared"];
const ALPHA = [0, 0.14, 0.4, 0.72, 1];
const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c6d31", "#7f7f7f"];
const FIELDS = 7; // state, owners, tokens, request, sequence, prefix, last need
const [STATE, OWNERS, TOKENS, REQUEST, SEQUENCE, PREFIX, NEED] = Array(FIELDS).keys();
const FREE = -1;
const SILENCE = 5000; // milliseconds without a message after which the connection counts as lost
const HISTORY = 240; // samples that a plot shows: a minute
const WINDOW = 40; // samples over which a rate of hits is taken: ten seconds
const LEGEND = 8; // requests or prefixes that the legend names
const ROWS = 25; // rows of the table of pages

const $ = (id) => document.getElementById(id);
const dark = matchMedia("(prefers-color-scheme: dark)");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// ------------------------------------------------------------------ the pool

let pool = null; // { groups, pageGroup, rows, counts, tokens, pages, names, clock, clocks }

function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  return new Int32Array(bytes.buffer);
}

function newPool(of) {
  const rows = of.groups.map((group) => {
    const all = new Int32Array(of.pages * group.perPage * FIELDS);
    for (let i = REQUEST; i < all.length; i += FIELDS) all[i] = all[i + SEQUENCE - REQUEST] = -1;
    return all;
  });
  return {
    groups: of.groups,
    pageBytes: of.pageBytes,
    pageGroup: new Int32Array(of.pages).fill(FREE),
    rows,
    counts: of.groups.map(() => STATES.map(() => 0)),
    tokens: of.groups.map(() => 0),
    pages: of.groups.map(() => 0),
    names: {},
    clock: 0,
    clocks: [], // [clock, seconds] of the messages so far
  };
}

/** Apply a message; return the pages that changed. */
function update(message) {
  const touched = new Set();
  if (message.names) pool.names = message.names;
  pool.clock = message.clock;
  pool.clocks.push([message.clock, message.stats.seconds]);
  if (pool.clocks.length > 10 * HISTORY) pool.clocks.splice(0, HISTORY);
  const pages = unpack(message.pages);
  for (let i = 0; i < pages.length; i += 2) {
    const [page, group] = [pages[i], pages[i + 1]];
    if (pool.pageGroup[page] !== FREE) pool.pages[pool.pageGroup[page]]--;
    if (group !== FREE) pool.pages[group]++;
    pool.pageGroup[page] = group;
    touched.add(page);
  }
  message.blocks.forEach((packed, g) => {
    const changed = unpack(packed);
    const [all, counts, perPage] = [pool.rows[g], pool.counts[g], pool.groups[g].perPage];
    for (let i = 0; i < changed.length; i += FIELDS + 1) {
      const at = changed[i] * FIELDS;
      counts[all[at + STATE]]--;
      if (all[at + STATE] > 2) pool.tokens[g] -= all[at + TOKENS];
      all.set(changed.subarray(i + 1, i + 1 + FIELDS), at);
      counts[all[at + STATE]]++;
      if (all[at + STATE] > 2) pool.tokens[g] += all[at + TOKENS];
      touched.add(Math.floor(changed[i] / perPage));
    }
  });
  return touched;
}

/** Return the index of the first record of a page, or nothing for a free page. */
function recordsOf(page) {
  const g = pool.pageGroup[page];
  if (g === FREE) return [];
  const n = pool.groups[g].perPage;
  return Array.from({ length: n }, (_, i) => (page * n + i) * FIELDS);
}

function ownerOf(g, at) {
  const [request, sequence] = [pool.rows[g][at + REQUEST], pool.rows[g][at + SEQUENCE]];
  if (request < 0 && sequence < 0) return "";
  const name = pool.names[request];
  return `${name ? `request ${name}` : `request ${request}`}, sequence ${sequence}`;
}

/** Return the time of a cached block's last need, if this page has seen it. */
function lastNeed(g, at) {
  const age = (then) => (pool.clock - then) >>> 0;
  const need = pool.rows[g][at + NEED] >>> 0;
  const now = pool.clocks[pool.clocks.length - 1][1];
  if (age(need) > age(pool.clocks[0][0])) return `> ${Math.round(now - pool.clocks[0][1])} s ago`;
  const seen = pool.clocks.find(([clock]) => age(clock) <= age(need));
  return `${Math.round(now - seen[1])} s ago`;
}

function countsOf(page) {
  const counts = STATES.map(() => 0);
  for (const at of recordsOf(page)) counts[pool.rows[pool.pageGroup[page]][at + STATE]]++;
  return counts;
}

/** Describe a page for the tooltip and for screen readers. */
function describe(page) {
  const g = pool.pageGroup[page];
  if (g === FREE) return `Page ${page}: free`;
  const counts = countsOf(page);
  const states = [4, 3, 2, 1].filter((s) => counts[s]).map((s) => `${counts[s]} ${STATES[s]}`);
  const lines = [`Page ${page}, ${pool.groups[g].name}: ${states.join(", ")}`];
  const owners = new Map();
  let [tokens, most, cached] = [0, 0, null];
  for (const at of recordsOf(page)) {
    tokens += pool.rows[g][at + TOKENS];
    most = Math.max(most, pool.rows[g][at + OWNERS]);
    const owner = ownerOf(g, at);
    if (owner) owners.set(owner, (owners.get(owner) || 0) + 1);
    if (pool.rows[g][at + STATE] === 2) cached = lastNeed(g, at);
  }
  const names = [...owners.keys()];
  if (names.length) lines.push(names.slice(0, 3).join("; ") + (names.length > 3 ? ` and ${names.length - 3} more` : ""));
  lines.push(`${tokens} tokens${most > 1 ? `, up to ${most} owners` : ""}${cached ? `, cached block needed ${cached}` : ""}`);
  return lines.join("\n");
}

// ------------------------------------------------------------------ the drawing

const map = $("map");
const paint = map.getContext("2d");
let shown = null; // the pages that are drawn, in their order
let placed = null; // by page: its place among them, or -1
let grid = { side: 0, columns: 1, rows: 1, gap: 0 };
let by = "group";
let cursor = 0;
let chosen = null;
const hues = new Map();

/** Choose the pages to draw; return whether they are others than before. */
function choosePages() {
  const all = pool.pageGroup.length;
  const kept = Array.from({ length: all }, (_, page) => page).filter((page) => !$("used").checked || pool.pageGroup[page] !== FREE);
  const same = shown && shown.length === kept.length && shown.every((page, i) => page === kept[i]) && placed.length === all;
  shown = kept;
  placed = new Int32Array(all).fill(-1);
  kept.forEach((page, i) => (placed[page] = i));
  return !same;
}

function layout() {
  choosePages();
  const number = Math.max(1, shown.length);
  const width = Math.max(120, map.parentElement.clientWidth - 28);
  const height = Math.max(300, innerHeight * 0.55);
  const zoomed = $("used").checked;
  const finger = innerWidth < 500 || matchMedia("(pointer: coarse)").matches; // a cell that can be tapped
  let side = zoomed ? 64 : 30;
  const least = finger && number <= 2000 ? 24 : 4;
  while (side > least && Math.ceil(number / Math.floor(width / side)) * side > height) side--;
  while (side > 2.5 && Math.ceil(number / Math.floor(width / side)) * side > 3 * height) side -= 0.5;
  const columns = Math.min(number, Math.floor(width / side));
  const rows = Math.ceil(number / columns);
  grid = { side, columns, rows, gap: side >= 14 ? 2 : side >= 4 ? 1 : 0.5 };
  const scale = devicePixelRatio || 1;
  map.width = Math.round(width * scale);
  map.height = Math.round((rows * side + 2) * scale);
  [map.dataset.side, map.dataset.columns] = [side, columns];
  map.style.height = `${rows * side + 2}px`;
  paint.setTransform(scale, 0, 0, scale, 0, 0);
  drawAll();
}

function hueOf(number) {
  let found = hues.get(number);
  if (!found) {
    found = `hsl(${Math.round((number * 137.508) % 360)} 62% ${dark.matches ? 62 : 42}%)`;
    hues.set(number, found);
  }
  return found;
}

function colourOf(g, at) {
  if (pool.rows[g][at + STATE] === 4 && by !== "prefix") return sharedColour; // whose it is: several sequences'
  if (by === "group") return COLOURS[g % COLOURS.length];
  const number = by === "request" ? pool.rows[g][at + REQUEST] : pool.rows[g][at + PREFIX] >>> 0;
  return number < 0 || (by === "prefix" && number === 0) ? colour("--free") : hueOf(number);
}

/** How many of a page's blocks lie side by side: no hole where a division without one is not too long. */
function acrossFor(n) {
  for (let across = Math.ceil(Math.sqrt(n)); across <= 2 * Math.sqrt(n); across++) if (n % across === 0) return across;
  return Math.ceil(Math.sqrt(n));
}

const placeOf = (page) => [1 + (placed[page] % grid.columns) * grid.side, 1 + Math.floor(placed[page] / grid.columns) * grid.side];

function drawPage(page) {
  if (placed[page] < 0) return;
  const [x, y] = placeOf(page);
  const size = grid.side - grid.gap;
  const g = pool.pageGroup[page];
  paint.clearRect(x - 1, y - 1, grid.side + 1, grid.side + 1);
  if (g === FREE) {
    paint.globalAlpha = 0.16;
    paint.fillStyle = freeColour;
    paint.fillRect(x, y, size, size);
  } else {
    const n = pool.groups[g].perPage;
    const across = acrossFor(n);
    const down = Math.ceil(n / across);
    const fits = size / across >= 2;
    const inner = fits && size / across >= 6 ? 1 : 0;
    const [w, h] = fits ? [size / across, size / down] : [size / n, size];
    for (let i = 0; i < n; i++) {
      const at = (page * n + i) * FIELDS;
      const state = pool.rows[g][at + STATE];
      paint.globalAlpha = ALPHA[state];
      paint.fillStyle = colourOf(g, at);
      const [left, top] = fits ? [x + (i % across) * w, y + Math.floor(i / across) * h] : [x + i * w, y];
      paint.fillRect(left, top, w - inner, h - inner);
      if (state === 4 && Math.min(w, h) >= 7) {
        paint.fillStyle = cardColour; // shared blocks have a mark, not only a shade
        paint.fillRect(left + w * 0.35, top + h * 0.35, (w - inner) * 0.3, (h - inner) * 0.3);
      }
    }
  }
  paint.globalAlpha = 1;
  if (page === chosen || (page === cursor && document.activeElement === map)) {
    paint.strokeStyle = page === chosen ? inkColour : focusColour;
    paint.lineWidth = Math.min(2, grid.side / 4);
    paint.strokeRect(x - 0.5, y - 0.5, size + 1, size + 1);
  }
}

let [freeColour, cardColour, inkColour, focusColour, sharedColour] = ["", "", "", "", ""];

function drawAll() {
  if (!pool) return;
  [freeColour, cardColour, inkColour, focusColour, sharedColour] = ["--free", "--card", "--ink", "--focus", "--shared"].map(colour);
  paint.clearRect(0, 0, map.width, map.height);
  shown.forEach(drawPage);
}

function redraw(...pages) {
  for (const page of pages) {
    if (page === null || page < 0) continue;
    // A neighbour's outline reaches into the cell, and clearing a cell cuts outlines.
    const at = placed[page];
    if (at < 0) continue;
    const near = [at - 1, at + 1, at - grid.columns, at + grid.columns, at];
    near.filter((i) => i >= 0 && i < shown.length).forEach((i) => drawPage(shown[i]));
  }
  [cursor, chosen].filter((page) => page !== null).forEach(drawPage);
}

function pageAt(event) {
  const box = map.getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left - 1) / grid.side);
  const row = Math.floor((event.clientY - box.top - 1) / grid.side);
  const at = row * grid.columns + column;
  return column >= 0 && column < grid.columns && at >= 0 && at < shown.length ? shown[at] : null;
}

// ------------------------------------------------------------------ hover, keys and choices

let hovered = null;

function showTip(page, x, y) {
  const tip = $("tip");
  tip.hidden = page === null;
  if (page === null) return;
  tip.textContent = describe(page);
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${y + 18 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 10 : y + 18}px`;
}

map.addEventListener("pointermove", (event) => {
  if (!pool) return;
  hovered = pageAt(event);
  showTip(hovered, event.clientX, event.clientY);
});
map.addEventListener("pointerleave", () => {
  hovered = null;
  showTip(null);
});
map.addEventListener("click", (event) => {
  const page = pool && pageAt(event);
  if (page === null) return;
  moveTo(page, true);
  showTip(page, event.clientX, event.clientY); // a tap moves no pointer
});
map.addEventListener("focus", () => pool && redraw(cursor));
map.addEventListener("blur", () => {
  showTip(null);
  if (pool) redraw(cursor);
});
map.addEventListener("keydown", (event) => {
  if (!pool) return;
  const [last, at] = [shown.length - 1, Math.max(0, placed[cursor])];
  if (last < 0) return;
  const steps = {
    ArrowLeft: at - 1, ArrowRight: at + 1, ArrowUp: at - grid.columns, ArrowDown: at + grid.columns,
    PageUp: at - 10 * grid.columns, PageDown: at + 10 * grid.columns, Home: 0, End: last,
  };
  if (event.key === "Escape") showTip(null);
  else if (event.key === "Enter" || event.key === " ") moveTo(cursor, true);
  else if (event.key in steps) moveTo(shown[Math.max(0, Math.min(last, steps[event.key]))], false);
  else return;
  event.preventDefault();
});

function moveTo(page, choose) {
  const before = [cursor, chosen];
  cursor = page;
  if (choose) chosen = page;
  redraw(...before, cursor);
  const [x, y] = placeOf(page);
  const box = map.getBoundingClientRect();
  if (document.activeElement === map) showTip(page, box.left + x, box.top + y);
  $("said").textContent = describe(page);
  showChosen();
}

function cell(row, text, kind) {
  const td = row.insertCell();
  td.textContent = text;
  if (kind) td.className = kind;
  return td;
}

function showChosen() {
  if (chosen === null || !pool) return;
  const g = pool.pageGroup[chosen];
  $("page-title").textContent = g === FREE ? `Page ${chosen}: free` : `Page ${chosen}: ${pool.groups[g].name}`;
  const body = $("page").tBodies[0];
  body.textContent = "";
  const records = recordsOf(chosen);
  for (const at of records.slice(0, 64)) {
    const [row, all] = [body.insertRow(), pool.rows[g]];
    cell(row, at / FIELDS);
    const state = all[at + STATE];
    cell(row, STATES[state], "text");
    cell(row, all[at + TOKENS]);
    cell(row, all[at + OWNERS]);
    cell(row, state === 2 ? lastNeed(g, at) : state > 2 ? "now" : "");
  }
  const owners = [...new Set(records.map((at) => ownerOf(g, at)).filter(Boolean))];
  const more = records.length > 64 ? ` ${records.length - 64} more blocks are not shown.` : "";
  $("page-owner").textContent = (owners.length ? `Owned by ${owners.slice(0, 8).join("; ")}.` : "No sequence owns a block of it.") + more;
}

document.querySelectorAll("input[name=by]").forEach((input) =>
  input.addEventListener("change", () => {
    by = input.value;
    drawAll();
    if (pool) showHues();
  }),
);
$("used").addEventListener("change", () => pool && layout());
dark.addEventListener("change", () => {
  hues.clear();
  drawAll();
  if (pool) showHues();
  plots.forEach(drawPlot);
});
addEventListener("resize", () => {
  if (pool) layout();
  plots.forEach(drawPlot);
});

// ------------------------------------------------------------------ tables and words

function showGroups() {
  const body = $("groups").tBodies[0];
  pool.groups.forEach((group, g) => {
    const row = body.rows[g] || body.insertRow();
    if (!row.cells.length) {
      const head = document.createElement("th");
      head.scope = "row";
      const swatch = document.createElement("span");
      swatch.className = "swatch";
      swatch.style.background = COLOURS[g % COLOURS.length];
      head.append(swatch, group.name);
      row.append(head);
      for (let i = 0; i < 6; i++) row.insertCell();
    }
    const counts = pool.counts[g];
    [pool.pages[g], counts[3] + counts[4], counts[4], pool.tokens[g], counts[2], counts[1]].forEach((value, i) => {
      row.cells[i + 1].textContent = value.toLocaleString("en");
    });
  });
}

function showPages() {
  if (!$("table").open || !pool) return;
  const number = pool.pageGroup.length;
  const start = Math.max(0, Math.min(number - 1, Number($("first").value) || 0));
  const body = $("pages");
  body.textContent = "";
  for (let page = start; page < Math.min(number, start + ROWS); page++) {
    const [row, g, counts] = [body.insertRow(), pool.pageGroup[page], countsOf(page)];
    cell(row, page);
    cell(row, g === FREE ? "free" : pool.groups[g].name, "text");
    for (const value of [counts[3] + counts[4], counts[4], counts[2], counts[1]]) cell(row, g === FREE ? "" : value);
    const records = recordsOf(page);
    cell(row, g === FREE ? "" : records.reduce((sum, at) => sum + pool.rows[g][at + TOKENS], 0));
    const requests = new Set(records.map((at) => pool.rows[g][at + REQUEST]).filter((id) => id >= 0));
    cell(row, [...requests].map((id) => pool.names[id] || id).join(", "), "text");
  }
}

function turn(by) {
  $("first").value = Math.max(0, (Number($("first").value) || 0) + by);
  showPages();
}
$("back").addEventListener("click", () => turn(-ROWS));
$("forth").addEventListener("click", () => turn(ROWS));
$("first").addEventListener("input", showPages);
$("table").addEventListener("toggle", showPages);

function bytes(number) {
  const power = Math.min(3, Math.floor(Math.log2(number) / 10));
  return `${(number / 2 ** (10 * power)).toLocaleString("en", { maximumFractionDigits: 1 })} ${["B", "KiB", "MiB", "GiB"][power]}`;
}

function showSummary(stats) {
  const free = pool.pageGroup.length - pool.pages.reduce((a, b) => a + b, 0);
  const inUse = 100 * (1 - stats.availablePages / stats.pages);
  $("summary").textContent =
    `${pool.pageGroup.length.toLocaleString("en")} large pages of ${bytes(pool.pageBytes)}, ` +
    `${inUse.toFixed(0)} % in use, ${free.toLocaleString("en")} free; ${stats.running} running, ${stats.waiting} waiting`;
}

let named = 0; // when the legend was written last

/** Return the requests or prefixes with the most blocks: [number, blocks], and how many there are. */
function largest() {
  const column = by === "request" ? REQUEST : PREFIX;
  const blocks = new Map();
  pool.rows.forEach((all) => {
    for (let at = 0; at < all.length; at += FIELDS) {
      const number = by === "request" ? all[at + column] : all[at + column] >>> 0;
      if (all[at + STATE] < 2 || number < 0 || (by === "prefix" && number === 0)) continue;
      if (by === "request" && all[at + STATE] === 4) continue; // drawn in the colour of shared blocks
      blocks.set(number, (blocks.get(number) || 0) + 1);
    }
  });
  return [[...blocks].sort((a, b) => b[1] - a[1]).slice(0, LEGEND), blocks.size];
}

/** Write what the colours mean. */
function showHues() {
  named = Date.now();
  const list = $("hues");
  list.textContent = "";
  const add = (shade, text) => {
    const item = document.createElement("li");
    if (shade) {
      const swatch = document.createElement("span");
      swatch.className = "swatch";
      swatch.style.background = shade;
      item.append(swatch);
    }
    item.append(text);
    list.append(item);
  };
  if (by === "group") pool.groups.forEach((group, g) => add(COLOURS[g % COLOURS.length], group.name));
  else {
    const [most, number] = largest();
    for (const [one, blocks] of most) {
      const name = by === "prefix" ? `prefix ${one.toString(16).padStart(8, "0")}` : `request ${pool.names[one] || one}`;
      add(hueOf(one), `${name}: ${blocks.toLocaleString("en")} block${blocks === 1 ? "" : "s"}`);
    }
    if (number > LEGEND) add("", `and ${number - LEGEND} more`);
    add("var(--free)", by === "request" ? "of no running request" : "of no whole prefix");
  }
  if (by !== "prefix") add("var(--shared)", "shared by several sequences");
}

let spoken = 0;

/** Tell screen readers the state once in a while, not four times a second. */
function speak(text) {
  const now = Date.now();
  if (now - spoken < 20000 || document.activeElement === map) return;
  spoken = now;
  $("said").textContent = text;
}

// ------------------------------------------------------------------ plots

const rate = (name) => (now, then) => (now[name] - then[name]) / (now.seconds - then.seconds);
const plots = [
  { title: "Requests", unit: "", whole: true, lines: [["running", (s) => s.running, "--a"], ["waiting", (s) => s.waiting, "--b"], ["swapped", (s) => s.swapped, "--c"]] },
  { title: "Step time", unit: "ms", lines: [["mean", (s, t) => (1000 * (s.stepSeconds - t.stepSeconds)) / (s.steps - t.steps || NaN), "--a"]] },
  { title: "Tokens", unit: "/s", lines: [["output", rate("outputTokens"), "--a"], ["prompt", rate("promptTokens"), "--b"]] },
  { title: "Prefix hits, last 10 s", unit: "%", top: 100, over: WINDOW, lines: [["hits", (s, t) => (100 * (s.hits - t.hits)) / (s.queries - t.queries || NaN), "--a"]] },
  { title: "Pool in use", unit: "%", top: 100, lines: [["used", (s) => 100 * (1 - s.availablePages / s.pages), "--a"]] },
];
let samples = [];

for (const plot of plots) {
  const figure = document.createElement("figure");
  figure.innerHTML = "<figcaption><span></span><b></b></figcaption><canvas role='img'></canvas>";
  figure.querySelector("span").textContent = plot.title;
  [plot.value, plot.canvas] = [figure.querySelector("b"), figure.querySelector("canvas")];
  plot.series = plot.lines.map(() => []);
  $("plots").append(figure);
}

const short = (value) => (Number.isNaN(value) ? "–" : value >= 100 ? value.toFixed(0) : value >= 10 || value % 1 === 0 ? value.toFixed(value % 1 ? 1 : 0) : value.toFixed(1));

function plotStats(stats) {
  samples.push(stats);
  if (samples.length > HISTORY) samples.shift();
  for (const plot of plots) {
    const then = samples[Math.max(0, samples.length - 1 - (plot.over || 4))]; // rates over a second
    plot.lines.forEach(([, value], i) => {
      const rated = value.length > 1 && samples.length < 2 ? NaN : value(stats, then);
      plot.series[i].push(rated);
      if (plot.series[i].length > HISTORY) plot.series[i].shift();
    });
    drawPlot(plot);
  }
}

/** Return a round number above a value, so that the axis does not move with each sample. */
function niceTop(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * unit).find((step) => step >= value);
}

let gutter = 46; // room for the axes' numbers, the same for all plots; it grows with the longest

function drawPlot(plot) {
  const { canvas, series, lines } = plot;
  const scale = devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, 72];
  const bottom = 14; // room for the times
  [canvas.width, canvas.height] = [Math.round(width * scale), Math.round(height * scale)];
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const known = series.flat().filter((value) => !Number.isNaN(value));
  const top = plot.top || niceTop(Math.max(plot.whole ? 1 : 0.001, ...known));
  const y = (value) => height - bottom - 1 - (value / top) * (height - bottom - 8);
  pen.font = "10.5px system-ui, sans-serif";
  const label = (value) => `${short(value)}${plot.unit && ` ${plot.unit}`}`;
  gutter = Math.max(gutter, Math.ceil(pen.measureText(label(top)).width) + 6);
  const left = gutter;
  pen.fillStyle = colour("--soft");
  pen.strokeStyle = colour("--line");
  pen.lineWidth = 1;
  pen.textAlign = "right";
  for (const value of [0, top]) {
    pen.textBaseline = value ? "top" : "bottom";
    pen.fillText(label(value), left - 5, value ? 2 : height - bottom + 2);
    pen.beginPath();
    pen.moveTo(left, Math.round(y(value)) + 0.5);
    pen.lineTo(width, Math.round(y(value)) + 0.5);
    pen.stroke();
  }
  pen.textBaseline = "alphabetic";
  pen.textAlign = "left";
  pen.fillText("60 s ago", left, height - 2);
  pen.textAlign = "right";
  pen.fillText("now", width - 1, height - 2);
  series.forEach((values, i) => {
    pen.strokeStyle = colour(lines[i][2]);
    pen.lineWidth = 1.5;
    pen.beginPath();
    let down = false;
    values.forEach((value, k) => {
      if (Number.isNaN(value)) return;
      const x = width - 2 - ((values.length - 1 - k) * (width - left - 2)) / (HISTORY - 1);
      down ? pen.lineTo(x, y(value)) : pen.moveTo(x, y(value));
      down = true;
    });
    pen.stroke();
  });
  plot.value.textContent = "";
  const words = lines.map(([name], i) => {
    const last = series[i].length ? series[i][series[i].length - 1] : NaN;
    const text = `${short(last)}${plot.unit && !Number.isNaN(last) ? " " + plot.unit : ""}${lines.length > 1 ? " " + name : ""}`;
    const part = document.createElement("span");
    part.textContent = text;
    part.style.color = colour(lines[i][2]);
    plot.value.append(part);
    return text;
  });
  canvas.setAttribute("aria-label", `${plot.title}, now ${words.join(", ")}; highest in the last minute ${short(Math.max(0, ...known))}`);
}

// ------------------------------------------------------------------ the stream

let connections = 0;
let wait = 250;
let stream = null;
let watching = false;

function status(state, text) {
  if ($("status").dataset.state === state && $("status").textContent === text) return;
  $("status").dataset.state = state;
  $("status").textContent = text;
}

function take(message) {
  if (message.pool) {
    pool = newPool(message.pool);
    cursor = Math.min(cursor, pool.pageGroup.length - 1);
    if (chosen !== null && chosen >= pool.pageGroup.length) chosen = null;
    samples = [];
    $("groups").tBodies[0].textContent = "";
    document.body.dataset.connections = ++connections;
    update(message);
    layout();
  } else {
    const touched = update(message);
    if ($("used").checked && choosePages()) layout();
    for (const page of touched) drawPage(page);
    if (touched.size) redraw(cursor);
  }
  status("live", message.late ? "live; the engine is in a long step" : "live");
  showGroups();
  if (message.pool || Date.now() - named > 1000) showHues();
  showSummary(message.stats);
  showChosen();
  showPages();
  plotStats(message.stats);
  if (hovered !== null) $("tip").textContent = describe(hovered);
  speak($("summary").textContent);
}

async function watch() {
  if (watching) return;
  if (document.hidden) return status("wait", "paused");
  watching = true;
  stream = new AbortController();
  let silence = setTimeout(() => stream.abort(), 2 * SILENCE);
  try {
    const key = sessionStorage.getItem("jpaged-key");
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const asked = new URLSearchParams({ replica: $("replica").value || 0 });
    const server = new URLSearchParams(location.search).get("server"); // the replica that a front forwards to
    if (server) asked.set("server", server);
    const answer = await fetch(`memory/events?${asked}`, { headers, signal: stream.signal, cache: "no-store" });
    if (answer.status === 401 || answer.status === 403) {
      $("key").hidden = false;
      status("key", key ? "this key may not watch" : "an admin key is needed");
      return;
    }
    if (answer.status === 400) throw new Error((await answer.json()).error.message);
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    $("key").hidden = true;
    showReplicas(Number(answer.headers.get("X-Replicas")));
    showModel(decodeURIComponent(answer.headers.get("X-Model") || ""));
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let parts = [];
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      clearTimeout(silence);
      silence = setTimeout(() => stream.abort(), SILENCE);
      parts.push(value);
      if (!value.includes("\n\n") && !(value.startsWith("\n") && parts.length > 1)) continue;
      const events = parts.join("").split("\n\n");
      parts = [events.pop()];
      for (const event of events) take(JSON.parse(event.slice("data: ".length)));
      wait = 250;
    }
  } catch (error) {
    console.info(`memory page: ${error}`);
  } finally {
    clearTimeout(silence);
    watching = false;
  }
  if (document.hidden) return status("wait", "paused");
  status("lost", "connection lost; trying again");
  setTimeout(watch, wait);
  wait = Math.min(2 * wait, 5000);
}

function showModel(name) {
  $("model").textContent = name;
  document.title = name ? `${name} - jpaged memory` : "jpaged memory";
}

function showReplicas(count) {
  $("replicas").hidden = count < 2;
  while ($("replica").options.length < count) $("replica").add(new Option($("replica").options.length));
}

$("replica").addEventListener("change", () => {
  wait = 50;
  stream?.abort(); // the next stream is that of the other pool
});
$("key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("jpaged-key", $("secret").value);
  $("secret").value = "";
  watch();
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) stream?.abort(); // a hidden page costs the engine nothing
  else if ($("status").dataset.state === "wait") watch();
});

[3, 2, 1].forEach((state) => {
  const item = document.createElement("li");
  const swatch = document.createElement("span");
  swatch.className = "swatch";
  swatch.style.background = "var(--a)";
  swatch.style.opacity = ALPHA[state];
  item.append(swatch, STATES[state]);
  $("shades").append(item);
});
watch();

"use strict";
// Draws the two charts of a profile into SVG. The page's tables hold the same figures as text.
const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const SVG = document.getElementById("pattern").namespaceURI;
const W = 1080, LEFT = 76, RIGHT = 12;

function make(tag, attributes, parent, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.appendChild(node);
  return node;
}

function bytes(size) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(size) < 1024) return `${Number(size.toPrecision(3))} ${unit}`;
    size /= 1024;
  }
  return `${Number(size.toPrecision(3))} TiB`;
}

function seconds(time) {
  const text = value => String(Number(value.toPrecision(3)));
  return time >= 1 || time === 0 ? `${text(time)} s` : time >= 1e-3 ? `${text(time * 1e3)} ms` : `${text(time * 1e6)} µs`;
}

// Round steps: 1, 2 or 5 times a power of ten, or powers of two
function ticks(low, high, count, binary) {
  const span = Math.max(high - low, 1e-12) / count;
  let step;
  if (binary) {
    step = 2 ** Math.ceil(Math.log2(span));
  } else {
    const power = 10 ** Math.floor(Math.log10(span));
    step = power * [1, 2, 5, 10].find(each => each * power >= span);
  }
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(at);
  return found;
}

function timeAxis(svg, range, x, top, bottom) {
  for (const at of ticks(range[0], range[1], 8)) {
    make("line", { class: "grid", x1: x(at), x2: x(at), y1: top, y2: bottom, opacity: 0.5 }, svg);
    make("text", { x: x(at), y: bottom + 16, "text-anchor": "middle" }, svg, seconds(at));
  }
}

// Drag to zoom, double-click to reset; `draw` is called with the new range
function zoomable(svg, whole, range, x, height, draw) {
  const back = at => range[0] + (at - LEFT) / (W - LEFT - RIGHT) * (range[1] - range[0]);
  const place = event => {
    const box = svg.getBoundingClientRect();
    return Math.min(Math.max((event.clientX - box.left) / box.width * W, LEFT), W - RIGHT);
  };
  let from = null, select = null;
  svg.addEventListener("pointerdown", event => {
    from = place(event);
    select = make("rect", { class: "select", x: from, y: 0, width: 0, height }, svg);
  });
  svg.addEventListener("pointermove", event => {
    if (from === null) return;
    const to = place(event);
    select.setAttribute("x", Math.min(from, to));
    select.setAttribute("width", Math.abs(to - from));
  });
  window.addEventListener("pointerup", event => {
    if (from === null) return;
    const to = place(event), [low, high] = [back(Math.min(from, to)), back(Math.max(from, to))];
    select.remove();
    const wide = Math.abs(to - from) > 4;
    from = null;
    if (wide) draw([low, high]);
  }, { signal: (svg.control = new AbortController()).signal });
  svg.addEventListener("dblclick", () => draw(whole));
  return back;
}

function begin(root, height) {
  const old = root.querySelector("svg");
  if (old) { old.control.abort(); old.remove(); }
  tip.hidden = true;
  return make("svg", { viewBox: `0 0 ${W} ${height}`, "aria-hidden": "true" }, root);
}

function show(event, content) {
  tip.replaceChildren(content);
  tip.hidden = false;
  const left = event.clientX + 16 + tip.offsetWidth > innerWidth ? event.clientX - 16 - tip.offsetWidth : event.clientX + 16;
  tip.style.left = `${Math.max(left, 4)}px`;
  tip.style.top = `${Math.min(event.clientY + 12, innerHeight - tip.offsetHeight - 4)}px`;
}

function table(title, rows) {
  const node = document.createElement("div"), body = document.createElement("table");
  node.append(title, body);
  for (const cells of rows) {
    const row = body.insertRow();
    cells.forEach((cell, place) => { const td = row.insertCell(); td.textContent = cell; if (place) td.className = "n"; });
  }
  return node;
}

function drawMemory(range) {
  const root = document.getElementById("memory"), line = data.timeline, H = 380, TOP = 34, BOTTOM = H - 26;
  const owners = Object.keys(line.owners), times = line.seconds, count = times.length;
  const totals = times.map((_, at) => owners.reduce((sum, owner) => sum + line.owners[owner][at], 0));
  const whole = [0, times[count - 1] || 1];
  range = range || whole;
  const svg = begin(root, H), most = totals[line.peak] * 1.04;
  const x = at => LEFT + (at - range[0]) / (range[1] - range[0]) * (W - LEFT - RIGHT);
  const y = size => BOTTOM - size / most * (BOTTOM - TOP);
  const clip = make("clipPath", { id: "inside" }, make("defs", {}, svg));
  make("rect", { x: LEFT, y: 0, width: W - LEFT - RIGHT, height: H }, clip);
  const plot = make("g", { "clip-path": "url(#inside)" }, svg);
  const below = new Array(count).fill(0);
  owners.forEach((owner, number) => {
    const above = [], under = [];
    for (let at = 0; at < count; at++) {
      const low = y(below[at]);
      below[at] += line.owners[owner][at];
      const high = y(below[at]), here = x(times[at]).toFixed(1), next = x(at + 1 < count ? times[at + 1] : times[at]).toFixed(1);
      // Bytes stay as they are until the next change
      above.push(`${here},${high.toFixed(1)}`, `${next},${high.toFixed(1)}`);
      under.push(`${here},${low.toFixed(1)}`, `${next},${low.toFixed(1)}`);
    }
    make("polygon", { class: "owner", points: [...above, ...under.reverse()].join(" "), fill: `var(--c${number % 12})` }, plot);
  });
  for (const at of ticks(0, most, 6, true)) {
    make("line", { class: "grid", x1: LEFT, x2: W - RIGHT, y1: y(at), y2: y(at), opacity: 0.6 }, svg);
    make("text", { x: LEFT - 8, y: y(at) + 4, "text-anchor": "end" }, svg, bytes(at));
  }
  timeAxis(svg, range, x, BOTTOM, BOTTOM);
  let free = LEFT;
  for (const phase of data.phases || []) {
    const here = x(phase.seconds);
    if (phase.seconds < range[0] || phase.seconds > range[1]) continue;
    make("line", { class: "phase", x1: here, x2: here, y1: 16, y2: BOTTOM }, plot);
    const text = phase.layer === null ? phase.phase : `${phase.phase} ${phase.layer}`;
    const left = Math.min(here + 3, W - RIGHT - text.length * 6.5);  // within the chart
    if (left >= free) {
      make("text", { x: left, y: 14 }, plot, text);
      free = left + 7 + text.length * 6.5;
    }
  }
  const top = x(times[line.peak]), right = top > W - 220;
  make("line", { class: "mark", id: "peak", x1: top, x2: top, y1: TOP - 10, y2: BOTTOM }, plot);
  make("text", { class: "strong", x: top + (right ? -6 : 6), y: TOP - 4, "text-anchor": right ? "end" : "start" }, plot,
    `peak ${bytes(totals[line.peak])}`);
  const cross = make("line", { class: "cross", y1: TOP, y2: BOTTOM, visibility: "hidden" }, plot);
  const back = zoomable(svg, whole, range, x, H, drawMemory);
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), wanted = back((event.clientX - box.left) / box.width * W);
    let at = 0, high = count - 1;
    while (at < high) { const middle = (at + high + 1) >> 1; if (times[middle] <= wanted) at = middle; else high = middle - 1; }
    cross.setAttribute("x1", x(times[at])); cross.setAttribute("x2", x(times[at])); cross.setAttribute("visibility", "visible");
    const rows = owners.filter(owner => line.owners[owner][at]).map(owner => [owner, bytes(line.owners[owner][at])]);
    show(event, table(`${seconds(times[at])}: ${bytes(totals[at])}`, rows));
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; cross.setAttribute("visibility", "hidden"); });
}

function drawLegend() {
  const root = document.getElementById("owners");
  Object.keys(data.timeline.owners).forEach((owner, number) => {
    const item = document.createElement("span");
    item.textContent = owner;
    item.style.setProperty("--own", `var(--c${number % 12})`);
    root.appendChild(item);
  });
}

function drawLanes(range) {
  const root = document.getElementById("lanes"), names = Object.keys(data.bars), ROW = 38, H = names.length * ROW + 34;
  const whole = [0, data.lanes_seconds];
  range = range || whole;
  const svg = begin(root, H), BOTTOM = H - 26;
  const x = at => LEFT + (at - range[0]) / (range[1] - range[0]) * (W - LEFT - RIGHT);
  timeAxis(svg, range, x, 0, BOTTOM);
  names.forEach((lane, number) => {
    const top = number * ROW + 6, group = make("g", { class: "lane", fill: `var(--${lane.split(" ")[0]})` }, svg);
    make("text", { x: LEFT - 8, y: top + 18, "text-anchor": "end" }, svg, lane);
    for (const [start, end] of data.bars[lane]) {
      if (end < range[0] || start > range[1]) continue;
      const left = x(Math.max(start, range[0])), right = x(Math.min(end, range[1]));
      make("rect", { x: left.toFixed(2), y: top, width: Math.max(right - left, 0.4).toFixed(2), height: ROW - 12 }, group);
    }
  });
  const back = zoomable(svg, whole, range, x, H, drawLanes);
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), at = back((event.clientX - box.left) / box.width * W);
    const busy = names.map(lane => [lane, data.bars[lane].some(([start, end]) => start <= at && at <= end) ? "busy" : "idle"]);
    show(event, table(seconds(Math.max(at, 0)), busy));
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; });
}

if (data.timeline) { drawMemory(); drawLegend(); }
if (data.bars) drawLanes();
document.documentElement.dataset.drawn = "yes";

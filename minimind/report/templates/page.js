// Draws the charts of a page as its controls say. What `meta` of a chart has: minimind/report/charts.py.
const { dark, isLinked, ...first } = JSON.parse(document.getElementById("figures").textContent);
let charts = first.charts;
let zoom = null;  // range of x that the reader has chosen, of linked charts
let pointed = null;  // plot and x under the pointer
const seen = new Map();  // plot -> range of x that it was first drawn with, to which plotly resets it
const isDark = matchMedia("(prefers-color-scheme: dark)");
const isTouch = matchMedia("(pointer: coarse)").matches;
const config = { responsive: true, displaylogo: false, modeBarButtons: [isTouch
  ? ["zoomIn2d", "zoomOut2d", "resetScale2d"]
  : ["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]] };
const ROW = 20, LEAST = 220;  // px of a row of a legend, and of the height between the axes

// What the controls say; an empty x or unit is that of the page.
const PLAIN = { x: "", smooth: "mean", weight: 0.9, y: "auto", unit: "" };
let view = { ...PLAIN };
const shared = () => Object.values(charts)[0]?.layout.meta ?? {};
const xUnit = () => shared().spans?.[view.x] ? view.x : shared().base;
const yUnit = () => shared().has_bits && (view.unit || (shared().is_bits && "bits")) || "nats";

function readHash() {
  const found = new URLSearchParams(location.hash.slice(1));
  for (const name of Object.keys(PLAIN)) view[name] = found.get(name) ?? PLAIN[name];
  const weight = Number(view.weight);
  view.weight = weight >= 0 && weight < 1 ? weight : PLAIN.weight;
  return found;
}
function writeHash() {
  const told = Object.entries(view).filter(([name, value]) => value !== PLAIN[name]);
  history.replaceState(null, "", told.length ? "#" + new URLSearchParams(told) : location.pathname + location.search);
}
function showControls() {
  const { elements } = document.getElementById("controls") ?? {};
  if (!elements) return;
  elements.x.value = xUnit();
  elements.y.value = view.y;
  elements.smooth.value = view.smooth;
  elements.weight.value = view.weight;
  elements.weight.disabled = view.smooth !== "ema";
  elements.told.value = view.weight;
  if (elements.unit) elements.unit.value = yUnit();
}
function control({ target }) {
  const { name, value } = target;
  if (!(name in view) || !target.closest("#controls")) return;
  if (name === "x") zoom = null;
  view[name] = name === "weight" ? Number(value) : value;
  writeHash();
  draw();
}

const ARRAYS = { f8: Float64Array, f4: Float32Array, i1: Int8Array, u1: Uint8Array, i2: Int16Array,
  u2: Uint16Array, i4: Int32Array, u4: Uint32Array };
function numbers(values) {  // as plotly.py writes them
  if (!values.bdata) return values;
  const bytes = Uint8Array.from(atob(values.bdata), char => char.charCodeAt(0));
  return [...new ARRAYS[values.dtype](bytes.buffer)];
}
function timeScale() {  // seconds of a unit of the x axis, and its name
  const [low, high] = shared().spans.time;
  return high - low < 600 ? [1, "s"] : high - low < 36000 ? [60, "min"] : [3600, "h"];
}
function place(knots, x, isLeft) {  // where a point is on the x axis; of a step with two times the later if isLeft
  const unit = xUnit();
  if (unit === shared().base) return x;
  const from = knots[shared().base], to = knots[unit], size = unit === "time" ? timeScale()[0] : 1;
  let low = 0, high = from.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (isLeft ? from[middle] <= x : from[middle] < x) low = middle + 1; else high = middle;
  }
  if (low === from.length || low === 0) return to[Math.min(low, from.length - 1)] / size;
  const share = (x - from[low - 1]) / (from[low] - from[low - 1]);
  return (to[low - 1] + share * (to[low] - to[low - 1])) / size;
}
function wholeRange() {
  const span = shared().spans?.[xUnit()];
  if (!span) return Object.values(charts)[0].layout.xaxis.range;
  return xUnit() === "time" ? span.map(seconds => seconds / timeScale()[0]) : span;
}
function average(values, weight) {  // exponential moving average, without the bias of its beginning
  let sum = 0, total = 0;
  return values.map(value => {
    if (!Number.isFinite(value)) return NaN;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}
function inUnit(trace) {  // with y in the unit of the loss
  const { meta } = trace;
  trace.x = [...numbers(trace.x)];
  trace.y = [...numbers(trace.y)];
  if (meta.means) meta.means = { x: numbers(meta.means.x), y: numbers(meta.means.y) };
  if (yUnit() === "bits" && meta.bits) trace.y = numbers(meta.bits);
  else if (yUnit() === "bits" && meta.nats) {
    trace.y = trace.y.map(nats => nats / meta.nats);
    if (meta.means) meta.means.y = meta.means.y.map(nats => nats / meta.nats);
  }
  return trace;
}
function smoothed(trace) {  // the traces that are drawn for one
  const { role, means } = trace.meta;
  if (view.smooth === "mean" || (role !== "raw" && role !== "mean")) return [trace];
  if (role === "mean") return [];
  const strong = { ...trace, opacity: 1, showlegend: true, line: { ...trace.line, width: 2 } };
  if (view.smooth === "none") return [strong];
  const faint = { ...trace, opacity: 0.45, showlegend: false, line: { ...trace.line, width: 1 } };
  const mean = { ...strong, mode: "lines", uid: trace.uid + "-ema", name: `${trace.name.replace(", each line", "")}, EMA ${view.weight}`,
    x: means ? means.x : trace.x, y: average(means ? means.y : trace.y, view.weight) };
  return [faint, mean];
}
function moved(trace) {  // with x in the unit of the x axis
  const { role, axis = 0 } = trace.meta, knots = shared().axes[axis];
  const { x } = trace;
  if (role === "level") return { ...trace, x: wholeRange() };
  if (xUnit() === shared().base) return trace;
  if (trace.type !== "bar") return { ...trace, x: x.map(one => place(knots, one)) };
  const offset = numbers(trace.offset), right = x.map(one => place(knots, one));
  const resumed = knots[shared().base].filter((one, n, all) => one === all[n - 1]);  // a bar does not cover what was lost
  const left = x.map((one, n) => Math.max(one + offset[n], ...resumed.filter(at => at < one)));
  const width = right.map((one, n) => one - place(knots, left[n], true));
  return { ...trace, x: right, width, offset: width.map(one => -one) };
}
function ticksOf(low, high) {  // of a log axis: 1, 2, 5 of each decade, or 1 alone if there are many
  const from = Math.floor(Math.log10(low)), to = Math.floor(Math.log10(high));
  const digits = to - from < 4 ? [1, 2, 5] : [1];
  return Array.from({ length: to - from + 1 }, (_, n) => digits.map(digit => Number(`${digit}e${from + n}`))).flat();
}
function setScale(chart) {  // linear or log; returns what the caption says of it
  const { yaxis, meta } = chart.layout, wasLog = yaxis.type === "log";
  const curves = chart.data.filter(one => one.yaxis !== "y2");
  const values = curves.flatMap(one => one.y).filter(Number.isFinite), positive = values.filter(one => one > 0);
  const isLog = positive.length && (view.y === "auto" ? wasLog : view.y === "log" && curves.every(one => one.type !== "bar"));
  if (wasLog && !isLog) for (const name of ["type", "tickvals", "ticktext"]) delete yaxis[name];
  if (!isLog) return meta.note === "log scale" ? "" : meta.note;
  const [low, high] = [positive.reduce((a, b) => Math.min(a, b)), positive.reduce((a, b) => Math.max(a, b))];
  for (const name of ["range", "rangemode", "tickvals", "ticktext"]) delete yaxis[name];
  yaxis.type = "log";
  if (high > 5 * low) {
    yaxis.tickvals = ticksOf(low, high);
    yaxis.ticktext = yaxis.tickvals.map(String);
  }
  return positive.length === values.length ? "log scale" : "log scale, without values of 0 or less";
}
function shown(key) {  // a chart as the controls say
  const chart = structuredClone(charts[key]), { layout } = chart, { meta } = layout;
  if (!meta) return chart;
  const isLoss = chart.data.some(one => one.meta.nats || one.meta.bits), isBits = isLoss && yUnit() === "bits";
  if (isBits) chart.data = chart.data.filter(one => one.meta.nats || one.meta.bits || one.meta.role === "strokes");
  chart.data = chart.data.map(inUnit).flatMap(smoothed).map(moved);
  layout.caption = [isBits ? "bits per byte" : meta.unit, setScale(chart)].filter(Boolean).join(", ");
  const unit = xUnit(), [size, noun] = unit === "time" ? timeScale() : [1, ""];
  const name = noun ? `time, ${noun}` : unit;
  layout.xaxis.title = { ...layout.xaxis.title, text: name };
  layout.xaxis.unifiedhovertitle = { text: noun ? `time %{x} ${noun}` : `${name} %{x}` };
  if (noun) layout.xaxis.hoverformat = ",.1f";
  const marks = shared().marks[unit];
  if (marks && layout.shapes) {
    const scaled = one => ({ ...one, ...Object.fromEntries(["x", "x0", "x1"].filter(at => at in one).map(at => [at, one[at] / size])) });
    layout.shapes = marks.shapes.map(scaled);
    if (layout.annotations) layout.annotations = marks.annotations.map(scaled);
  }
  return chart;
}
function recolor(value) {  // light colors to dark ones
  if (typeof value === "string") return dark[value] || value;
  if (Array.isArray(value)) return value.map(recolor);
  if (value === null || typeof value !== "object" || ArrayBuffer.isView(value)) return value;
  return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, recolor(one)]));
}
function fit(plot, { data, layout }) {  // the legend leaves the chart its height
  const isNarrow = plot.clientWidth < 500;
  const entries = data.filter(one => one.showlegend !== false);
  if (!layout.meta || !layout.showlegend && entries.length < 2) return;
  layout.showlegend = entries.length > 1;
  const longest = Math.max(...entries.map(one => one.name.length), 1), room = plot.clientWidth - 70;
  const columns = isNarrow ? (longest > 18 ? 1 : 2) : Math.max(1, Math.floor(room / (7 * longest + 50)));
  const rows = layout.showlegend ? Math.ceil(entries.length / columns) : 0;
  plot.style.minHeight = `${LEAST + 64 + ROW * rows}px`;
  if (!isNarrow) return;
  layout.legend = { entrywidth: columns > 1 ? 0.48 : 0.96, entrywidthmode: "fraction", font: { size: 11 } };
  for (const one of entries) if (one.name.length > 36) one.name = one.name.slice(0, 35) + "\u2026";
}
function draw() {
  for (const key of Object.keys(charts)) {
    const plot = document.querySelector("#" + key + " .plot");
    let chart = shown(key);
    if (isDark.matches) chart = recolor(chart);
    const { data, layout } = chart;
    if (isTouch) layout.dragmode = false;  // a finger scrolls
    if (layout.caption) document.querySelector("#" + key + " .unit").textContent = layout.caption;
    delete layout.caption;
    fit(plot, chart);
    const labels = data.filter(one => one.meta?.label);
    if (labels.length) layout.margin = { r: plot.clientWidth < 500 ? 54 : 92 };
    const isNew = !seen.has(plot);
    keep(layout);
    if (isNew) seen.set(plot, String(layout.xaxis?.range));
    Plotly.react(plot, data, layout, config);
    if (isNew) listen(plot);
    if (labels.length) label(plot);
    leaveOut(plot);
  }
  if (pointed) Plotly.Fx.hover(pointed.plot, { xval: pointed.x });
  showControls();
}
function keep(layout) {  // what the reader has zoomed and hidden, over drawings
  layout.uirevision = "kept";
  if (layout.yaxis) layout.yaxis.uirevision = `${layout.yaxis.type || "linear"} ${yUnit()}`;
  if (isLinked) Object.assign(layout.xaxis, { range: [...(zoom || wholeRange())], uirevision: Math.random() });
}
function label(plot) {  // names of levels at their right ends, moved apart
  const { yaxis } = plot._fullLayout, isNarrow = plot.clientWidth < 500, isLog = yaxis.type === "log";
  const levels = plot.data.filter(one => one.meta?.label && one.visible !== "legendonly");
  const found = levels.map(one => ({ one, at: yaxis.d2p(one.y[0]) }))
    .filter(({ at }) => at >= 0 && at <= yaxis._length).sort((a, b) => a.at - b.at);
  const height = 14;
  let last = -Infinity;
  for (const each of found) last = each.drawn = Math.max(each.at, last + height);
  let next = yaxis._length + 4;
  for (const each of found.toReversed()) next = (each.drawn = Math.min(each.drawn, next)) - height;
  const names = found.map(({ one, at, drawn }) => ({ xref: "paper", x: 1, xanchor: "left", yanchor: "middle", showarrow: false,
    name: "level", y: isLog ? Math.log10(one.y[0]) : one.y[0], yshift: at - drawn, font: { size: 11, color: one.line.color },
    text: one.meta.label + (isNarrow ? "" : ` ${one.y[0].toFixed(3)}`) }));
  const marks = (plot.layout.annotations ?? []).filter(one => one.name !== "level");
  Plotly.relayout(plot, { annotations: [...marks, ...names] });
}
function leaveOut(plot) {  // a chart is a picture with a table: its tools are for the pointer
  for (const button of plot.querySelectorAll(".modebar-btn, [tabindex='0']")) button.tabIndex = -1;
}
function listen(plot) {
  plot.on("plotly_hover", event => { pointed = { plot, x: event.points[0].x }; });
  plot.on("plotly_unhover", () => { pointed = null; });
  plot.on("plotly_afterplot", () => leaveOut(plot));
  plot.on("plotly_relayout", changed => {
    if (Object.keys(changed).some(name => name.startsWith("yaxis")) && plot.data.some(one => one.meta?.label)) label(plot);
  });
  if (isLinked) plot.on("plotly_relayout", () => {  // zoom all charts alike
    const range = plot.layout.xaxis.range;
    if (String(range) === String(zoom || wholeRange())) return;
    zoom = String(range) === seen.get(plot) ? null : [...range];
    for (const other of seen.keys()) Plotly.relayout(other, { "xaxis.range": [...(zoom || wholeRange())] });
  });
}
function csvOf(key) {  // every drawn value, in all units of y
  const rows = new Set(), curves = [];
  const textOf = html => new DOMParser().parseFromString(html, "text/html").body.textContent;
  const add = (name, x, y) => {
    curves.push([`"${textOf(name).replaceAll('"', '""')}"`, new Map(Array.from(x, (one, n) => [one, y[n]]))]);
    for (const one of x) rows.add(one);
  };
  for (const { name, x, y, meta } of charts[key].data) {
    if (meta.role === "level" || meta.role === "strokes") continue;
    const at = numbers(x), values = numbers(y);
    add(name, at, values);
    if (meta.bits) add(`${name}, bits per byte`, at, numbers(meta.bits));
    else if (meta.nats) add(`${name}, bits per byte`, at, Array.from(values, nats => nats / meta.nats));
  }
  const cells = [...rows].sort((a, b) => a - b).map(x => [x, ...curves.map(([, known]) => Number.isFinite(known.get(x)) ? known.get(x) : "")]);
  return [[shared().base, ...curves.map(([name]) => name)], ...cells].map(row => row.join(",") + "\r\n").join("");
}
function download(event) {
  const link = event.target.closest?.("a.csv");
  if (link) link.href = URL.createObjectURL(new Blob([csvOf(link.closest("figure").id)], { type: "text/csv" }));
}
function filterSettings() {
  const field = document.getElementById("filter");
  if (!field) return;
  const rows = [...document.querySelectorAll("#settings tbody tr, #settings .pairs span")];
  for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(field.value.trim().toLowerCase());
  const found = rows.filter(row => !row.hidden).length;
  document.getElementById("found").textContent = field.value ? `${found} of ${rows.length}` : "";
}
function scrollConsoles(areAtEnd) {  // to their last lines, unless the reader has gone up
  document.querySelectorAll(".console").forEach((one, n) => { if (areAtEnd[n] ?? true) one.scrollTop = one.scrollHeight; });
}
document.addEventListener("input", event => { if (event.target.id === "filter") filterSettings(); else control(event); });
document.addEventListener("reset", () => {
  view = { ...PLAIN };
  zoom = null;
  writeHash();
  setTimeout(draw);  // after the fields are reset
});
document.addEventListener("submit", event => event.preventDefault());
document.addEventListener("click", download);
scrollConsoles([]);
const step = Number.parseFloat(readHash().get("step"));
draw();
addEventListener("hashchange", () => { if (location.hash.includes("=")) { readHash(); draw(); } });
isDark.addEventListener("change", draw);
if (step >= 0) for (const plot of seen.keys())  // left of a bar's end
  Plotly.Fx.hover(plot, { xval: xUnit() === "step" ? step - 0.25 : place(shared().axes[0], step) });

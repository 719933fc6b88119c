"""What the page does where scripts run: a pointer over a chart reads the values at that place.

Without it the page is whole: the curves are drawn and the legends say the last values.
`#step=N` at the end of the address points at a place from the start.
"""

SCRIPT = """
const drawn = JSON.parse(document.getElementById("drawn").textContent);
const charts = [...document.querySelectorAll("figure.chart")];
const last = new Map(charts.flatMap(c => [...c.querySelectorAll("b[data-name]")]
  .map(b => [b, b.textContent])));
function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const mid = (low + high) >> 1;
    if (xs[mid] < x) low = mid + 1; else high = mid;
  }
  return low && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
}
function told(y, form) {
  if (y === null || y === undefined) return "\\u2013";
  if (form === "percent") return (100 * y).toFixed(1) + "%";
  if (form === "milliseconds")
    return y >= 999.5 ? +(y / 1e3).toPrecision(3) + " s" : +y.toPrecision(3) + " ms";
  const size = Math.abs(y);
  if (size >= 1000) return Math.round(y).toLocaleString("en-US");
  if (size && size < 0.01) return y.toExponential(2);
  return y.toFixed(size < 10 ? 4 : 1);
}
function point(x) {
  for (const chart of charts) {
    const low = +chart.dataset.x0, high = +chart.dataset.x1;
    const cursor = chart.querySelector(".cursor");
    cursor.style.display = "block";
    cursor.style.left = 100 * (x - low) / (high - low) + "%";
    chart.querySelector(".x-name").textContent = axis + " " + Math.round(x).toLocaleString("en-US");
    for (const b of chart.querySelectorAll("b[data-name]")) {
      const found = (drawn[chart.id] || {})[b.dataset.name];
      if (found && found[0].length)
        b.textContent = told(found[1][chart.classList.contains("stacked")
          ? Math.max(0, found[0].findIndex(end => end >= x)) : nearest(found[0], x)],
          chart.dataset.form);
    }
  }
}
function leave() {
  for (const chart of charts) {
    chart.querySelector(".cursor").style.display = "none";
    chart.querySelector(".x-name").textContent = axis;
  }
  for (const [b, text] of last) b.textContent = text;
}
const axis = document.body.dataset.axis;
for (const chart of charts) {
  const plot = chart.querySelector(".plot"), low = +chart.dataset.x0, high = +chart.dataset.x1;
  const at = event => {
    const box = plot.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    point(Math.round(low + share * (high - low)));
  };
  plot.addEventListener("pointermove", at);
  plot.addEventListener("pointerdown", at);
  plot.addEventListener("pointerleave", event => event.pointerType === "touch" || leave());
}
const asked = /^#step=([0-9]+)$/.exec(location.hash);
if (asked) point(+asked[1]);
"""

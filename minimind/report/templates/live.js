// Of `minimind report --watch`: follows the server that the page came from (watch.py).
const BEAT = 5;  // seconds in which the server says at least that it is there
const [state, more] = document.querySelectorAll("#live > *");
let source = null, next = null, isPressed = false;
let heard = Date.now(), lineAt = null, problem = "", going = { kind: "waiting", text: "" };
function connect() {
  source = new EventSource("/events");
  const hear = (name, act) => source.addEventListener(name, event => {
    heard = Date.now();
    act(JSON.parse(event.data));
    tell();
  });
  hear("beat", () => {});
  hear("problem", text => { problem = text; });
  hear("report", content => { next = content; problem = ""; show(); });
  source.onerror = disconnect;  // a browser may not try again by itself
}
function disconnect() {
  source?.close();
  source = null;
  tell();
}
function show() {
  if (!next || isPressed) return;  // not while the reader draws a box
  const { title, body, line_age, state: told } = next;
  ({ charts } = next);
  next = null;
  lineAt = line_age === null ? null : Date.now() - 1e3 * line_age;
  going = told;
  document.title = title;
  const areAtEnd = [...document.querySelectorAll(".console")].map(one => one.scrollTop + one.clientHeight > one.scrollHeight - 40);
  merge(document.querySelector("main"), new DOMParser().parseFromString(body, "text/html").body);
  for (const plot of [...seen.keys()].filter(one => !one.isConnected)) {
    Plotly.purge(plot);
    seen.delete(plot);
    if (pointed?.plot === plot) pointed = null;
  }
  draw();
  filterSettings();
  scrollConsoles(areAtEnd);
}
function merge(old, fresh) {  // what is equal stays: selected text, scrolled tables, drawn charts
  let place = old.firstChild;
  for (const child of [...fresh.childNodes]) {
    const known = child.id && old.querySelector(":scope > #" + child.id);
    if (known && known !== place) old.insertBefore(known, place);
    const other = known || (child.id || place?.id ? null : place);
    if (!known) place = other ? place.nextSibling : place;
    else if (known === place) place = place.nextSibling;
    if (!other) old.insertBefore(child, place);
    else if (other.nodeType !== Node.ELEMENT_NODE || other.nodeName !== child.nodeName) {
      if (!other.isEqualNode(child)) other.replaceWith(child);
    } else if (!other.classList.contains("plot")) {
      for (const { name } of [...other.attributes]) if (!child.hasAttribute(name) && name !== "open") other.removeAttribute(name);
      for (const { name, value } of child.attributes)
        if (other.getAttribute(name) !== value) other.setAttribute(name, value);
      merge(other, child);
    }
  }
  while (place) {
    const gone = place;
    place = place.nextSibling;
    gone.remove();
  }
}
function ago(seconds) {
  const [size, unit] = seconds < 100 ? [1, "s"] : seconds < 6000 ? [60, "min"] : [3600, "h"];
  return `${Math.round(seconds / size)} ${unit}`;
}
function tell() {  // screen readers say the state, not each second
  const since = (Date.now() - heard) / 1e3;
  const isLost = source?.readyState !== EventSource.OPEN || since > 4 * BEAT;
  const isStarting = isLost && since < 2;
  const age = lineAt === null ? null : (Date.now() - lineAt) / 1e3;
  const [name, text, rest] = isStarting ? ["", "Connecting.", ""]
    : isLost ? ["stale", "Not up to date.", `No answer from minimind report --watch for ${ago(since)}; trying again.`]
    : problem ? ["stale", "Not up to date.", problem]
    : going.kind !== "running" ? [going.kind, going.text, ""]
    : age > going.stale ? ["quiet", going.text, `No new event for ${ago(age)}.`]
    : ["current", going.text, age === null ? "No line yet." : `The last line was written ${ago(age)} ago.`];
  document.getElementById("live").className = name;
  if (state.textContent !== text) state.textContent = text;
  more.textContent = rest;
}
setInterval(() => {
  if (document.hidden) return;
  if (source && Date.now() - heard > 4e3 * BEAT) disconnect();  // such as after the computer slept
  if (!source) connect();
  tell();
}, 1000);
addEventListener("pointerdown", () => { isPressed = true; }, true);
for (const name of ["pointerup", "pointercancel", "blur"])
  addEventListener(name, () => { isPressed = false; setTimeout(show); }, true);
document.addEventListener("visibilitychange", () => {  // a browser has few connections to a server
  if (document.hidden) disconnect(); else connect();
});
connect();
tell();

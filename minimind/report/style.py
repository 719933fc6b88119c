"""How the page looks: on a large screen, a phone and paper, by day and in the dark.

The colours are those of Okabe and Ito (2008), which people with any kind of colour vision tell
apart; in the dark the lighter ones of them.
"""

from minimind.report.records import PAUSES, PHASES

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1d2733; --soft: #5c6773; --rule: #dfe3e8;
  --wash: #f6f7f9; --k0: #0072b2; --k1: #d55e00; --k2: #009e73; --k3: #b0578d; --k4: #b8860b;
  --k5: #3a9bd9; --k6: #6b5b95; --k7: #555; --val: #d55e00; --bad: #c0392b; --good: #00795a;
  --p-data: #e69f00; --p-forward: #56b4e9; --p-backward: #0072b2; --p-optimizer: #009e73;
  --p-evaluate: #cc79a7; --p-checkpoint: #7b4fa0; --p-sample: #999;
  --p-trace: #ccc; --p-gc: #8c6d46; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181d; --ink: #e4e8ec; --soft: #97a3af;
  --rule: #2c343d; --wash: #1b2128; --k0: #56b4e9; --k1: #f08b43; --k2: #2fc99b; --k3: #d98cba;
  --k4: #e6b422; --k5: #9ad0f5; --k6: #b3a1e0; --k7: #b5b5b5; --val: #f08b43; --bad: #ff7b6b;
  --good: #2fc99b; --p-backward: #2f86c8; --p-forward: #8fd0f7; --p-checkpoint: #b08fd4; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1280px; margin: 0 auto; padding: 28px 32px 48px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 40px 0 10px; }
h3 { font-size: 15px; margin: 0; }
p { margin: 4px 0; max-width: 62em; }
.lead { font-size: 17px; } .quiet, .unit, small, footer { color: var(--soft); }
footer { margin-top: 44px; font-size: 13px; border-top: 1px solid var(--rule); padding-top: 10px; }
.tiles { display: flex; flex-wrap: wrap; margin: 20px 0 18px; gap: 1px; background: var(--rule);
  border: 1px solid var(--rule); }
.tile { background: var(--paper); padding: 10px 14px; flex: 1 1 150px; }
.tile span { display: block; color: var(--soft); font-size: 13px; }
.tile b { font-size: 23px; line-height: 1.25; font-weight: 600; white-space: nowrap; }
.tile small { display: block; }
.bar { display: flex; height: 16px; margin: 10px 0 6px; gap: 1px; }
.bar i { display: block; background: var(--c); min-width: 1px; }
.charts { display: grid; grid-template-columns: 1fr 1fr; gap: 30px 40px; }
figure { margin: 0; min-width: 0; break-inside: avoid; } figure.wide { grid-column: 1 / -1; }
figcaption { display: flex; flex-wrap: wrap; align-items: baseline; gap: 0 10px;
  margin-bottom: 6px; font-size: 13px; }
.legend { display: flex; flex-wrap: wrap; gap: 0 14px; font-size: 13px; max-width: none; }
figcaption .legend { margin-left: auto; }
.key { display: inline-flex; align-items: center; gap: 5px; overflow-wrap: anywhere; }
.key b { font-variant-numeric: tabular-nums; }
.key i { width: 16px; height: 0; border-top: 2.5px solid var(--c); flex: none; }
.key i.raw { opacity: .45; border-top-width: 1.5px; }
.key i.limit { border-top: 1.5px dashed var(--c); }
.key i.dots { width: 8px; height: 8px; border: 0; border-radius: 50%; background: var(--c); }
.key i.layer { width: 11px; height: 11px; border: 0; background: var(--c); }
.key i.foot { width: 2px; height: 9px; border: 0; background: var(--c); }
.key.dashed i { border-top-style: dashed; } .key.dotted i { border-top-style: dotted; }
.plot { position: relative; height: 190px; margin-left: 54px; border-bottom: 1px solid var(--soft);
  touch-action: pan-y; cursor: crosshair; }
.wide .plot { height: 320px; } .wide.stacked .plot { height: 240px; }
svg { position: absolute; inset: 0; width: 100%; height: 100%; display: block; overflow: visible; }
svg path { fill: none; vector-effect: non-scaling-stroke; stroke-linejoin: round; }
svg .grid { stroke: var(--rule); stroke-width: 1; }
svg .line { stroke: var(--c); stroke-width: 2; }
svg .raw { stroke-width: 1; opacity: .45; } svg .joined { stroke-width: 1; opacity: .6; }
svg .dots { stroke-width: 7; stroke-linecap: round; }
svg .lost { opacity: .5; stroke-width: 1; stroke-dasharray: 3 2; }
svg .dots.lost { stroke-dasharray: none; stroke-width: 6; opacity: .35; }
svg .dashed { stroke-dasharray: 6 3; } svg .dotted { stroke-dasharray: 1.5 3; }
svg .limit { stroke-width: 1.25; stroke-dasharray: 5 4; }
svg .layer { fill: var(--c); } svg .band { fill: var(--soft); opacity: .11; }
svg .mark { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 4 3; }
svg .mark.crashed, svg .mark.failed { stroke: var(--bad); stroke-dasharray: none; }
svg .foot { stroke: var(--c); stroke-width: 1.5; }
.y, .x, .x-name { position: absolute; font-size: 12px; line-height: 1; color: var(--soft);
  font-variant-numeric: tabular-nums; white-space: nowrap; }
.y { right: calc(100% + 7px); transform: translateY(-50%); }
.across { position: relative; height: 22px; margin-left: 54px; }
.x { top: 6px; transform: translateX(-50%); } .x-name { right: 0; top: 20px; }
.x.first { transform: translateX(-20%); } .x.final { transform: translateX(-85%); }
.labels { position: relative; height: calc(var(--w) * 19px); margin-left: 54px; }
.label { position: absolute; top: calc(var(--w) * 19px); font-size: 12px; line-height: 17px;
  white-space: nowrap; padding: 0 5px; border-left: 2px solid var(--soft); color: var(--soft); }
.label.left { transform: translateX(-100%); border-left: 0; border-right: 2px solid var(--soft); }
.label.crashed, .label.failed { color: var(--bad); border-color: var(--bad); }
.label.no-wide { display: none; }
.charts:has(.wide.ended) .wide :is(.plot, .across, .labels),
  .ended :is(.plot, .across, .labels) { margin-right: 104px; }
.end { position: absolute; left: calc(100% + 8px); font-size: 12.5px; line-height: 14px;
  width: 96px; transform: translateY(-50%); color: var(--c); font-weight: 600; overflow: hidden;
  text-overflow: ellipsis; white-space: nowrap; }
.sign { position: absolute; width: 0; height: 0; }
.sign::before { content: "\\d7"; position: absolute; font: 700 22px/0 Arial, sans-serif;
  transform: translate(-50%, 0); color: var(--c); }
.k0 ~ .sign.crashed::before, .alone .sign::before { color: var(--bad); }
.sign.stopped::before { content: "\\25a0"; font-size: 11px; }
.cursor { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--ink); opacity: .5;
  display: none; pointer-events: none; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; width: 100%; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: 13px; }
th, td { padding: 5px 16px 5px 0; border-bottom: 1px solid var(--rule); vertical-align: top;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
.starts td:nth-child(5), .final td:last-child { white-space: normal; min-width: 18em; }
.halves { display: grid; grid-template-columns: repeat(auto-fit, minmax(380px, 1fr)); gap: 0 40px; }
.flags td { white-space: normal; overflow-wrap: anywhere; padding: 3px 12px 3px 0; }
.flags td:first-child { white-space: nowrap; } .flags .flag { white-space: nowrap; }
.flags td + td { min-width: 7.5em; }
code { font: 13px/1.4 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.how.crashed, .how.failed { color: var(--bad); font-weight: 600; }
.how.done { color: var(--good); } .how.running { font-weight: 600; }
.pairs { margin-top: 12px; font-size: 14px; max-width: none; }
.pairs span { margin-right: 14px; display: inline-block; max-width: 100%; overflow-wrap: anywhere; }
.pairs b { margin-right: 8px; } .pairs code { color: var(--soft); }
blockquote { margin: 8px 0; padding: 6px 12px; background: var(--wash); white-space: pre-wrap;
  overflow-wrap: anywhere; }
@media screen and (max-width: 700px) { main { padding: 16px 14px 32px; } h1 { font-size: 22px; }
  .lead { font-size: 16px; } .charts { grid-template-columns: minmax(0, 1fr); gap: 26px; }
  .tile { padding: 8px 10px; flex-basis: 40%; } .halves { display: block; }
  .tile b { font-size: 20px; } figcaption .legend { margin-left: 0; width: 100%; }
  .ranks { font-size: 13px; } .ranks :is(th, td) { padding-right: 9px; }
  .wide .plot { height: 240px; } .plot, .across, .labels { margin-left: 48px; }
  .labels { height: calc(var(--n) * 19px); } .label { top: calc(var(--n) * 19px); }
  .end { display: none; }
  .charts figure :is(.plot, .across, .labels) { margin-right: 0 !important; }
  .halves > div + div thead { display: none; } .flags { table-layout: fixed; }
  .flags th:first-child { width: 36%; } .flags th:nth-child(2) { width: 28%; }
  .flags td:first-child { white-space: normal; } .flags td + td { min-width: 0; }
  .starts thead { display: none; } .starts tr { display: block; padding: 6px 0;
  border-bottom: 1px solid var(--rule); } .starts td { display: flex; gap: 10px; border: 0;
  padding: 1px 0; white-space: normal; } .starts td:empty { display: none; }
  .starts td::before { content: attr(data-name); flex: 0 0 84px; color: var(--soft); }
  .label.no-wide { display: block; } .label.no-narrow { display: none; } }
@media print { :root { color-scheme: light; } main { max-width: none; padding: 0; }
  body { font-size: 11px; } .lead { font-size: 13px; } h1 { font-size: 19px; }
  h2, h3 { break-after: avoid; } h2 { margin-top: 22px; }
  .tile { flex-basis: 15%; padding: 5px 8px; } .wide .plot { height: 200px; }
  .wide.stacked .plot { height: 150px; }
  .plot { height: 140px; } .charts { grid-template-columns: 1fr 1fr; gap: 16px 24px; }
  .tile b { font-size: 16px; } table, code, .pairs { font-size: 10px; } tr { break-inside: avoid; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } @page { margin: 14mm; } }
"""

TONES = (*(f"k{n}" for n in range(8)), *(f"p-{n}" for n in (*PHASES, *PAUSES)), "val")
OTHERS = {
    "checkpoint": "p-checkpoint",
    "skipped": "bad",
    "clipped": "val",
    "limit": "soft",
    "comm": "ink",
}
OTHERS |= {"range": "soft"}


def style() -> str:
    """The style sheet."""
    tones = {**{tone: tone for tone in TONES}, **OTHERS}
    return STYLE + "".join(f".{name} {{ --c: var(--{tone}); }}\n" for name, tone in tones.items())

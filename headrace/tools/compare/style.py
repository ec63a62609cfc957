"""Style of the page: two colour schemes, selected by the reader's system preference."""

STYLE = """
:root { color-scheme: light dark; --ink: #1b2733; --soft: #5b6b7a; --line: #d5dde4; --page: #fff;
  --card: #f6f8fa; --bad: #b3261e; --good: #1a7f4b; --s0: #7a8793; --s1: #2f6fdb; --s2: #d9730d; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4eaf0; --soft: #9aa9b7; --line: #34414d;
  --page: #12181e; --card: #1a222a; --bad: #ff8a80; --good: #5fd39a; --s0: #8c9aa7;
  --s1: #7aa7ff; --s2: #ffa64d; } }
body { margin: 0 auto; padding: 24px; max-width: 1040px; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 28px 0 8px; }
p.about { color: var(--soft); margin: 0 0 16px; }
.verdict { display: inline-block; padding: 2px 12px; border-radius: 6px; font-weight: 600;
  border: 2px solid currentColor; }
.good { color: var(--good); } .bad { color: var(--bad); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { color: var(--soft); font-weight: 500; } td.n, th.n { text-align: right; }
.plots { margin-top: 12px; display: grid; gap: 16px;
  grid-template-columns: repeat(auto-fill, minmax(380px, 1fr)); }
figure { margin: 0; padding: 10px; background: var(--card); border-radius: 8px; }
svg { width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 11px; }
svg .axis { fill: none; stroke: var(--soft); } svg .grid { stroke: var(--line); }
svg .limit { stroke: var(--bad); stroke-dasharray: 4 3; }
polyline { fill: none; stroke-width: 2; } polyline.s0 { stroke: var(--s0); }
polyline.s1 { stroke: var(--s1); } polyline.s2 { stroke: var(--s2); }
rect.s0, i.s0 { fill: var(--s0); background: var(--s0); }
rect.s1, i.s1 { fill: var(--s1); background: var(--s1); }
rect.s2, i.s2 { fill: var(--s2); background: var(--s2); }
.legend { margin: 2px 0 0; font-size: 13px; color: var(--soft); }
.legend span { margin-right: 16px; } .legend i { display: inline-block; width: 12px; height: 12px;
  border-radius: 2px; margin-right: 6px; vertical-align: -1px; }
code { font: 12.5px/1.45 ui-monospace, monospace; overflow-wrap: anywhere; }
td.command { min-width: 300px; }
"""

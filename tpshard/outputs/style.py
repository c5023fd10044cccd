"""The style of the page: light and dark, by what the reader's system asks for."""

from __future__ import annotations

CSS = """
:root{--mono:ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace;
--ground:#f6f7f9;--card:#fff;--ink:#16202c;--soft:#5b6877;--line:#dfe4ea;--grid:#e8ecf1;--pass:#0b7a5b;--pass-soft:#dff3ec;
--fail:#b3261e;--fail-soft:#fbe4e2;--warn:#8a5a00;--warn-soft:#fbeecd;--data:#2457b8;--bar:#5b86d6}
@media(prefers-color-scheme:dark){:root{--ground:#0f141a;--card:#171e27;--ink:#e6ebf1;--soft:#9aa7b5;--line:#2a3440;--grid:#232c37;
--pass:#4fcf9f;--pass-soft:#12352b;--fail:#ff8a80;--fail-soft:#43191a;--warn:#f0c05a;--warn-soft:#3a2d0e;--data:#8fb4ff;--bar:#5b86d6}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue","Noto Sans","Liberation Sans",sans-serif}
.wrap{max-width:1120px;margin:0 auto;padding:0 24px}
header{border-bottom:1px solid var(--line);background:var(--card);border-top:6px solid var(--pass);padding:26px 0 20px}
header:not(.passed){border-top-color:var(--warn)}
header.failed{border-top-color:var(--fail)}
.kicker{margin:0;color:var(--soft);font-size:13px;letter-spacing:.04em}
h1{margin:2px 0 4px;font-size:34px;line-height:1.2;display:flex;align-items:center;gap:12px}
header .icon{display:inline-flex;width:36px;height:36px;border-radius:50%;align-items:center;
justify-content:center;font-size:20px;background:var(--pass-soft);color:var(--pass)}
header:not(.passed) .icon{background:var(--warn-soft);color:var(--warn)}
header.failed .icon{background:var(--fail-soft);color:var(--fail)}
.what{margin:0 0 16px;font-family:var(--mono);overflow-wrap:anywhere}
dl{margin:0}
.facts{display:flex;flex-wrap:wrap;gap:8px 36px}
dt{color:var(--soft);font-size:12.5px}
dd{margin:0;overflow-wrap:anywhere;font-variant-numeric:tabular-nums}
section{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:20px 22px;margin:20px 0}
section.findings{border-color:var(--fail);background:var(--fail-soft)}
h2{font-size:18px;margin:0 0 12px}
h3{font-size:15px;margin:20px 0 6px}
ol,ul{margin:0;padding-left:22px}
li{margin:4px 0;overflow-wrap:anywhere}
.tag{font-weight:600}
.note{color:var(--soft);font-size:13px;margin:2px 0 0}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
caption{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
th{font-size:12.5px;font-weight:600;color:var(--soft);text-align:left;white-space:nowrap;padding:6px 14px 6px 0;
border-bottom:1px solid var(--line)}
td{padding:8px 14px 8px 0;border-bottom:1px solid var(--grid);vertical-align:top}
tr:last-child td{border-bottom:0}
.n{text-align:right;white-space:nowrap}
td code,li code{font-size:13px;overflow-wrap:normal;word-break:normal}
tr:has(+.notes) td{border-bottom:0;padding-bottom:2px}
.notes td{padding-top:0;overflow-wrap:anywhere}
code,pre{font-family:var(--mono)}
pre{background:var(--ground);border:1px solid var(--line);border-radius:8px;padding:10px 14px;
overflow-x:auto;font-size:13px;margin:0}
.badge{display:inline-flex;gap:6px;align-items:center;border-radius:999px;padding:1px 10px;
font-size:13px;font-weight:600;white-space:nowrap;background:var(--warn-soft);color:var(--warn)}
.badge.passed,.badge.pass{background:var(--pass-soft);color:var(--pass)}
.badge.failed,.badge.fail{background:var(--fail-soft);color:var(--fail)}
.badge.not_run,.badge.skip{background:var(--grid);color:var(--soft)}
details{margin-top:12px}
summary{cursor:pointer;color:var(--data);font-weight:600}
:focus-visible{outline:2px solid var(--data);outline-offset:2px}
.legend{display:flex;flex-wrap:wrap;gap:4px 10px;align-items:center;color:var(--soft);font-size:13px;margin:0 0 8px}
.key{display:inline-block;width:9px;height:9px;border-radius:50%;margin-left:10px}
.key:first-child{margin-left:0}
.key.forced{background:var(--data)}
.key.free{border:2px solid var(--data);width:10px;height:10px}
.key.gate{border-radius:0;width:18px;height:0;border-top:2px dashed var(--fail)}
.key.cross{width:auto;height:auto;color:var(--fail);font-weight:700}
.chart{display:block;max-width:none}
.chart text{font-size:12px;fill:var(--soft)}
.chart .name{font-size:11px}
.chart .value{fill:var(--ink)}
.chart .power{font-size:9px}
.grid{stroke:var(--grid)}
.axis{stroke:var(--soft)}
.gate{stroke:var(--fail);stroke-width:1.5;stroke-dasharray:5 3}
.hit{fill:transparent}
g:hover .hit{fill:var(--grid);opacity:.6}
.stem{stroke:var(--data);opacity:.25}
.forced{fill:var(--data)}
.free{fill:none;stroke:var(--data);stroke-width:1.6}
g.fail .forced{stroke:var(--fail);stroke-width:2.6;fill:none}
g.fail .stem{stroke:var(--fail)}
g.drift .forced{fill:var(--warn)}
.bar{fill:var(--bar)}
.meter{height:10px;border-radius:5px;background:var(--grid);overflow:hidden}
.meter div{height:100%;background:var(--pass)}
.columns{display:grid;grid-template-columns:repeat(auto-fit,minmax(230px,1fr));gap:4px 32px;margin-top:4px}
.columns dl>div{display:flex;justify-content:space-between;gap:16px;border-bottom:1px solid var(--grid);padding:4px 0}
.columns dd{text-align:right}
@media print{body{background:#fff}section{break-inside:avoid}}
""".strip()

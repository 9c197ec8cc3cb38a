"""How does the page look? Its style and its one small script, both inside the page.

Colours are variables, one set for light and one for dark; text reaches a contrast of 4.5, lines and bars 3, in both.
The script sorts the table of tables; without it the table stays as it is.
"""

from __future__ import annotations

__all__ = ["SCRIPT", "STYLE"]

STYLE = """
:root{color-scheme:light dark;--bg:#f4f6f9;--card:#fff;--ink:#18202b;--soft:#515c6b;--line:#dde2e9;--grid:#e6eaf0;
--main:#1d5fc4;--target:#5a6472;--thin:#8a97a8;--o0:#b3500a;--o1:#18794e;--o2:#8a3fb5;--o3:#b02a52;
--gone:#b3500a;--both:#8a6a4a;--track:#e3e8ef;--rest:#8491a2;--warn:#8a4b00;--warnbg:#fff3dc}
@media screen and (prefers-color-scheme:dark){
:root{--bg:#0e131a;--card:#171e28;--ink:#e8edf4;--soft:#a7b3c2;--line:#2b3543;
--grid:#263040;--main:#6fa8ff;--target:#aab5c3;--thin:#66758a;--o0:#f0a05a;--o1:#58c994;--o2:#cb9cff;--o3:#ff8fae;
--gone:#f0a05a;--both:#c0a080;--track:#2a3442;--rest:#66758a;--warn:#ffcf87;--warnbg:#3a2c12}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
overflow-wrap:anywhere}
main,header,footer{max-width:84rem;margin:0 auto;padding:0 1.25rem}
header{padding-top:1.75rem}footer{padding-top:1rem;padding-bottom:2.5rem;color:var(--soft);font-size:.85rem}
h1{font-size:1.6rem;line-height:1.2;margin:0 0 .35rem}h2{font-size:1.15rem;margin:2.25rem 0 .75rem}
h3{font-size:1rem;margin:0}p{margin:.2rem 0}.soft,figcaption p,.none{color:var(--soft);font-size:.85rem}
.warn{background:var(--warnbg);color:var(--warn);padding:.5rem .8rem;border-radius:.5rem;margin:.8rem 0}
.heads{display:grid;grid-template-columns:repeat(3,1fr);gap:.9rem;margin:1.25rem 0 0}
@media(min-width:72rem){.heads{grid-template-columns:repeat(auto-fit,minmax(10.5rem,1fr))}}
.head,.card{background:var(--card);border:1px solid var(--line);border-radius:.75rem;padding:1rem 1.1rem;min-width:0}
.head dt{color:var(--soft);font-size:.85rem}.head dd{margin:0}
.head .big{font-size:1.75rem;font-weight:650;line-height:1.25;font-variant-numeric:tabular-nums}
.head .more{color:var(--soft);font-size:.85rem}
dl.heads{padding:0}.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,27rem),1fr));gap:.9rem}
.card{margin:0;display:flex;flex-direction:column}.wide{grid-column:1/-1}figcaption{margin-bottom:.6rem}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.1rem 1rem;margin:0 0 .5rem;padding:0;font-size:.85rem}
.legend li::before{content:"";display:inline-block;width:1.1rem;border-top:3px solid var(--c,var(--main));
margin-right:.4rem;vertical-align:.25em}
.legend .target::before{border-top-style:dashed;--c:var(--target)}
.legend .gone::before,.legend .kept::before,.legend .both::before,
.parts li::before{width:.8rem;height:.8rem;border:0;
background:var(--c,var(--main));vertical-align:-.05em;border-radius:2px}
.other0{--c:var(--o0)}.other1{--c:var(--o1)}.other2{--c:var(--o2)}.other3{--c:var(--o3)}.gone{--c:var(--gone)}.both{--c:var(--both)}
.plot{display:grid;grid-template-columns:auto 1fr;margin-top:auto;padding-right:.6rem;font-size:.78rem;
color:var(--soft);font-variant-numeric:tabular-nums}
.y{position:relative;margin-right:.45rem}.y b{visibility:hidden;font-weight:400;white-space:nowrap}
.y span{position:absolute;right:0;transform:translateY(-50%);white-space:nowrap}
.area{position:relative;height:13.5rem}.area svg{position:absolute;inset:0;width:100%;height:100%;overflow:visible}
.x{grid-column:2;position:relative;height:1.4rem;border-top:1px solid var(--soft)}
.x span{position:absolute;top:.15rem;transform:translateX(-50%);white-space:nowrap}
.label{grid-column:2;text-align:center}
path{fill:none;stroke:var(--c,var(--main));stroke-width:2.5;stroke-linejoin:round;stroke-linecap:round;
vector-effect:non-scaling-stroke}
path.grid{stroke:var(--grid);stroke-width:1}path.target{stroke:var(--target);stroke-width:2;stroke-dasharray:2 5}
path.table{stroke:var(--thin);stroke-width:1;opacity:.75}path.raw{stroke-width:1;opacity:.4}
path.other{stroke-width:2}path.threshold{stroke:var(--ink);stroke-width:2;stroke-dasharray:5 4}
rect{fill:var(--main);shape-rendering:crispEdges}rect.gone{fill:var(--gone)}rect.both{fill:var(--both)}
.at{position:absolute;top:-.2rem;margin:0 .4rem;color:var(--ink);background:var(--card);padding:0 .2rem;
pointer-events:none}
.tip{position:absolute;top:0;bottom:0}.tip span{display:none;position:absolute;top:.3rem;z-index:2;width:max-content;
max-width:15rem;background:var(--ink);color:var(--card);padding:.3rem .55rem;border-radius:.4rem;line-height:1.4;
pointer-events:none}
.tip.l span{left:calc(100% + .4rem)}.tip.r span{right:calc(100% + .4rem)}.tip:hover span{display:block}
.tip u{display:none;position:absolute;top:0;bottom:0;border-left:1px solid var(--soft)}.tip:hover u{display:block}
.beside{display:flex;margin-top:auto;gap:.9rem}.beside .plot{flex:1;min-width:0;margin-top:1.4rem}
.zero{display:flex;flex-direction:column;align-items:center;font-size:.78rem;color:var(--soft);width:3.2rem;
height:16.3rem}
.zero>span{height:1.4rem;white-space:nowrap}.zeros{height:13.5rem;width:1.3rem;position:relative;background:var(--track);
border-radius:3px 3px 0 0;border-bottom:1px solid var(--soft)}
.zeros i{position:absolute;left:0;right:0;bottom:0;background:var(--c)}
.bars{list-style:none;margin:0;padding:0;font-size:.88rem}
.bars li{display:grid;grid-template-columns:minmax(6rem,14rem) 1fr 14rem;gap:.1rem .8rem;
align-items:center;padding:.16rem 0}
.bar{background:var(--track);height:.95rem;border-radius:3px;overflow:hidden}.bar i{display:block;height:100%;
background:var(--main)}.bars .text{font-variant-numeric:tabular-nums;color:var(--soft)}
.stack{display:flex;height:1.7rem;border-radius:5px;overflow:hidden;gap:2px;margin:.2rem 0 .8rem}
.stack i{background:var(--c)}.part0{--c:var(--gone)}.part1{--c:var(--main)}.rest{--c:var(--rest)}
.scroll{overflow:auto;max-height:38rem;padding:0}table{border-collapse:collapse;width:100%;font-size:.85rem;
font-variant-numeric:tabular-nums}
th,td{padding:.45rem .55rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
th:first-child,td:first-child,.text{text-align:left}th{position:sticky;top:0;background:var(--card);color:var(--soft);
font-weight:600}
td:first-child{max-width:22rem;min-width:8rem;white-space:normal}
.bars .name{display:-webkit-box;-webkit-box-orient:vertical;-webkit-line-clamp:2;overflow:hidden}
th button{all:unset;cursor:pointer}th button:focus-visible,.scroll:focus-visible{outline:2px solid var(--main);
outline-offset:2px}
th[aria-sort=ascending] button::after{content:" \\2191"}th[aria-sort=descending] button::after{content:" \\2193"}
pre{margin:0;padding:1rem;font:13px/1.5 ui-monospace,Consolas,monospace;white-space:pre-wrap}
@media(max-width:40rem){.bars li{grid-template-columns:1fr;padding:.4rem 0}main,header,footer{padding-left:.8rem;
padding-right:.8rem}.head,.card{padding:.85rem .8rem}.heads{grid-template-columns:1fr 1fr}
.head .big{font-size:1.4rem}.scroll{padding:0}.tip span{max-width:11rem}}
@media(max-width:26rem){.head .big{font-size:1.2rem}}
@media print{:root{--bg:#fff}body{font-size:11px}.card,.head{break-inside:avoid}.scroll{max-height:none;
overflow:visible}.tip{display:none}*{print-color-adjust:exact}}
"""

SCRIPT = """
for (const head of document.querySelectorAll("th[data-key]")) {
  const button = document.createElement("button");
  button.type = "button";
  button.append(...head.childNodes);
  head.append(button);
  button.addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") === "descending";
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const body = head.closest("table").tBodies[0];
    const place = head.cellIndex;
    const key = (row) => row.cells[place].dataset.value;
    const order = (a, b) => (isNaN(a) || isNaN(b) || a === "" || b === "" ? a.localeCompare(b) : a - b);
    body.append(...[...body.rows].sort((a, b) => (up ? 1 : -1) * order(key(a), key(b))));
  });
}
"""

"""The style sheet and the script of the page of results."""

from __future__ import annotations

from cutex import svg

STYLE = """
*{box-sizing:border-box}
body{margin:0 auto;max-width:72rem;padding:1rem 1.25rem 4rem;background:var(--page);
color:var(--ink);font:15px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}
header{display:flex;flex-wrap:wrap;align-items:baseline;gap:.25rem 1.25rem}
h1{font-size:1.6rem;margin:0}h2{font-size:1.25rem;margin:2.5rem 0 .5rem}
h3{font-size:1.05rem;margin:1.5rem 0 .25rem}small,figcaption,header p{color:var(--soft)}
nav{display:flex;flex-wrap:wrap;gap:.25rem 1rem;flex-basis:100%}
a{color:var(--c0)}button,select,input{font:inherit;color:inherit;background:none;
border:1px solid var(--grid);border-radius:4px;padding:.1rem .5rem}
select option{background:var(--page)}
figure{margin:.75rem 0 1.5rem}figcaption{font-size:.9rem;margin-bottom:.75rem}
figure svg{display:block;max-width:100%;height:auto}
.narrow{display:none}.size{font-weight:600;margin:1rem 0 .25rem}
.bar{display:grid;grid-template-columns:minmax(0,19rem) minmax(0,1fr) 12rem;gap:0 .75rem;
align-items:center;padding:.25rem 0;font-size:.9rem;line-height:1.3}
.what{color:var(--soft)}.what b{color:var(--ink)}
.track{background:var(--grid);border-radius:3px;height:.9rem;overflow:hidden}
.track i{display:block;height:100%}.text{font-variant-numeric:tabular-nums;white-space:nowrap}
.legend{display:flex;flex-wrap:wrap;gap:.1rem 1rem;margin-top:.25rem;color:var(--ink)}
.legend i{display:inline-block;width:.7rem;height:.7rem;border-radius:50%;margin-right:.35rem}
.scroll{overflow:auto;max-height:38rem}table{border-collapse:collapse;font-size:.85rem;width:100%}
th,td{padding:.3rem .6rem;text-align:left;border-bottom:1px solid var(--grid);white-space:nowrap;
vertical-align:top}.scroll th,.scroll td{padding:.3rem .35rem}th{white-space:normal}
#best td:first-child,#rows td{white-space:normal}#rows td.n{white-space:nowrap}
#rows td:nth-child(10){white-space:normal}
th{position:sticky;top:0;background:var(--page)}
th button{border:0;padding:0;font-weight:600;cursor:pointer;text-align:left}
th[aria-sort=ascending] button::after{content:" \\2191"}
th[aria-sort=descending] button::after{content:" \\2193"}
th.n,.n{text-align:right;font-variant-numeric:tabular-nums}
dl{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:.1rem 1rem;font-size:.9rem;
padding:.75rem 0;border-top:1px solid var(--grid);margin:0}dt{color:var(--soft)}
dd{margin:0;overflow-wrap:anywhere}
@media (max-width:44rem){body{padding:.75rem .75rem 3rem}.wide{display:none}.narrow{display:block}
.bar{grid-template-columns:minmax(0,1fr) 11rem}.what{grid-column:1/-1}}
"""

SCRIPT = """
"use strict";
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.firstChild.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = row => row.cells[column].dataset.v;
    const rows = [...table.tBodies[0].rows];
    const numeric = rows.every(row => value(row) !== "" && !isNaN(value(row)));
    rows.sort((a, b) => (numeric ? value(a) - value(b) : value(a).localeCompare(value(b)))
      * (down ? -1 : 1));
    table.tBodies[0].append(...rows);
  }));
}
for (const input of document.querySelectorAll("input[data-filters]")) {
  const rows = [...document.getElementById(input.dataset.filters).tBodies[0].rows];
  input.addEventListener("input", () => {
    const wanted = input.value.toLowerCase();
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  });
}
for (const ladder of document.querySelectorAll(".ladder")) {
  const choice = ladder.querySelector("select");
  const show = () => {
    for (const block of ladder.querySelectorAll("[data-size]"))
      block.hidden = block.dataset.size !== choice.value;
  };
  choice.addEventListener("change", show);
  show();
}
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
"""


def style() -> str:
    """The style sheet, with the colours of both themes."""
    dark = svg.variables(svg.DARK)
    return (
        f":root{{{svg.variables(svg.LIGHT)}color-scheme:light}}"
        "@media (prefers-color-scheme:dark)"
        f"{{:root:not([data-theme=light]){{{dark}color-scheme:dark}}}}"
        f":root[data-theme=dark]{{{dark}color-scheme:dark}}" + STYLE
    )

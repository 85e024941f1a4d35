"""A page that needs nothing from elsewhere: its frame and its looks."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1c2329; --soft: #5b6670; --grid: #d9dfe4;
  --mark: #b3261e; --c0: #6b7680; --c1: #0b6bcb; --c2: #c25100; --c3: #12805c; --c4: #8a3ffc; --c5: #b0256e;
  --c6: #7a6200; --c7: #00738a; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181c; --ink: #e8ecef; --soft: #a3adb6;
  --grid: #333b43; --mark: #ff8a80; --c0: #9aa5af; --c1: #62b0ff; --c2: #ff9f5a; --c3: #4fd1a1; --c4: #bd93ff;
  --c5: #ff80b5; --c6: #e0c34a; --c7: #4fd0e6; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 70rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0.2rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
p, li { max-width: 46rem; } .soft { color: var(--soft); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px;
  font-variant-numeric: tabular-nums; }
th, td { padding: 0.2rem 0.5rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--grid); }
th { color: var(--soft); font-weight: 500; vertical-align: bottom; }
td:first-child, th:first-child { text-align: left; }
tr.traffic td { font-weight: 600; padding-top: 0.9rem; } .bad { color: var(--mark); font-weight: 600; }
.plot { width: 100%; height: auto; display: block; } .pair { display: flex; flex-wrap: wrap; gap: 1rem; }
.pair .plot { flex: 1 1 22rem; } .legend span { margin-right: 1.2rem; white-space: nowrap; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg .heading { font-weight: 600; font-size: 13px; paint-order: stroke; stroke: var(--paper);
  stroke-width: 4px; }
svg .middle { text-anchor: middle; } svg .end { text-anchor: end; } svg .axis { fill: var(--soft); }
svg .grid { stroke: var(--grid); } svg .reference { stroke: var(--ink); stroke-dasharray: 4 3; }
svg .range { stroke: currentColor; stroke-width: 3; } svg .tick { stroke: currentColor; stroke-width: 1.5; }
svg circle { fill: currentColor; } svg polyline { fill: none; stroke: currentColor; stroke-width: 2; }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); } .c3 { color: var(--c3); }
.c4 { color: var(--c4); } .c5 { color: var(--c5); } .c6 { color: var(--c6); } .c7 { color: var(--c7); }
.legend svg { vertical-align: -1px; }
"""


def page(title: str, body: Iterable[str]) -> str:
    """The whole page of a body; light or dark as the browser is."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )

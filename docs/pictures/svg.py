"""A small drawing in SVG that takes the colours of the page it is on, and of the reader's system elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

STYLE = """
svg.rz{--ink:#24292f;--soft:#6e7781;--line:#afb8c1;--box:#f6f8fa;
--a:#1f6feb;--b:#b9630f;--c:#2e8b57;--d:#8250df;--e:#c93c63}
@media (prefers-color-scheme:dark){svg.rz{--ink:#e6edf3;--soft:#9aa4ae;--line:#57606a;--box:#23272e;
--a:#2f6fd0;--b:#b86a1f;--c:#2f8559;--d:#7d57c7;--e:#b8486b}}
svg.rz text{font:13px system-ui,sans-serif;fill:var(--ink)} svg.rz .soft{fill:var(--soft)}
svg.rz .small{font-size:11px} svg.rz .strong{font-weight:600} svg.rz .on{fill:#fff}
svg.rz .box{fill:var(--box);stroke:var(--line)} svg.rz .empty{fill:none;stroke:var(--line)}
svg.rz .line{stroke:var(--soft);stroke-width:1.4;fill:none} svg.rz .dash{stroke-dasharray:4 3;stroke-width:0.6}
svg.rz .head{fill:var(--soft)} svg.rz .a{fill:var(--a)} svg.rz .b{fill:var(--b)} svg.rz .c{fill:var(--c)}
svg.rz .d{fill:var(--d)} svg.rz .e{fill:var(--e)} svg.rz .curve{fill:none} svg.rz .thin{stroke-width:0.8}
svg.rz .thick{stroke-width:2.4} svg.rz .sa{stroke:var(--a)} svg.rz .sb{stroke:var(--b)}
"""
"""Colours a to e stand for things; the site's own style sheet sets the same variables by its palette."""


class Drawing:
    """Shapes in the order of their calls. Lengths are in pixels, from the top left."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._shapes: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, kind: str = "box", radius: float = 4) -> None:
        """A rectangle of a class of STYLE."""
        self._shapes.append(
            f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}"/>'
        )

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        """One line of text whose baseline is at ``y``."""
        self._shapes.append(
            f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def line(self, x: float, y: float, to_x: float, to_y: float, kind: str = "line", *, arrow: bool = False) -> None:
        """A straight line, with a head at its end if it is an arrow."""
        end = ' marker-end="url(#head)"' if arrow else ""
        self._shapes.append(f'<line class="{kind}" x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"{end}/>')

    def curve(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """Lines from point to point."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._shapes.append(f'<polyline class="{kind}" points="{path}"/>')

    def svg(self) -> str:
        """The file's content."""
        head = (
            f'<svg class="rz" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" role="img" aria-label="{escape(self.title)}">'
        )
        marker = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path class="head" d="M0 0L8 4L0 8z"/></marker></defs>'
        )
        style = "".join(STYLE.splitlines())
        return "\n".join([head, f"<style>{style}</style>", marker, *self._shapes, "</svg>", ""])

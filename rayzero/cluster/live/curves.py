"""The curves of the live page: what was reported, by step, in bounded memory however long a run is."""

from __future__ import annotations

from collections.abc import Mapping

from rayzero.cluster.files.row_tail import Value

__all__ = ["MOST_POINTS", "Curve", "Curves"]

MOST_POINTS = 400  # of one curve: about as many as a screen has pixels for
_MOST_CURVES = 24
_LEAST = ("loss", "validation_loss", "tokens_per_second")  # these have a place, whatever comes first


class Curve:
    """Points (step, value). When there are too many, every second one goes, and from then on every second one that
    comes; the newest is always there."""

    def __init__(self) -> None:
        self._points: list[tuple[int, float]] = []
        self._newest: tuple[int, float] | None = None
        self._every, self._seen = 1, 0

    def add(self, step: int, value: float) -> None:
        """One more point. A step that is done again replaces what followed it."""
        if self._newest is not None and step <= self._newest[0]:
            self._points = [point for point in self._points if point[0] < step]
        self._newest = (step, value)
        if self._seen % self._every == 0:
            self._points.append(self._newest)
        self._seen += 1
        if len(self._points) > MOST_POINTS:
            self._points = self._points[::2]
            self._every *= 2

    @property
    def points(self) -> list[tuple[int, float]]:
        """The points that are kept, in the order of steps."""
        if self._newest is None or (self._points and self._points[-1] == self._newest):
            return list(self._points)
        return [*self._points, self._newest]


class Curves:
    """One curve for each name that has numbers. Knows rows' values; not where they come from."""

    def __init__(self) -> None:
        self._curves: dict[str, Curve] = {}

    def add(self, step: int, values: Mapping[str, Value]) -> None:
        """Take a row. Names beyond the first ``_MOST_CURVES`` have no curve."""
        for name, value in values.items():
            has_room = name in _LEAST or len(self._curves) < _MOST_CURVES
            if not isinstance(value, str) and (name in self._curves or has_room):
                self._curves.setdefault(name, Curve()).add(step, float(value))

    def points(self) -> dict[str, list[tuple[int, float]]]:
        """Every curve's points, by name."""
        return {name: curve.points for name, curve in self._curves.items()}

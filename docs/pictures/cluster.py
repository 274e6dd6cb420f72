"""The processes of a run, and what travels between them."""

from __future__ import annotations

from docs.pictures.svg import Drawing


def draw() -> str:
    """Ranks with GPUs on top, optimizer actors with CPU memory below."""
    made = Drawing(760, 370, "Ranks compute, optimizer actors hold the states; parameters go up, gradients go down")
    made.box(10, 10, 740, 46)
    made.text(24, 38, "driver", "strong")
    made.text(74, 38, "rayzero train, or your script with ZeroTrainer: starts, watches and replaces processes", "soft")
    for number in range(3):
        _rank(made, 10 + 250 * number, number)
    for number in range(2):
        _owner(made, 10 + 380 * number, number)
    for number in range(3):
        x = 10 + 250 * number + 120
        made.line(x - 34, 246, x - 34, 172, arrow=True)
        made.line(x + 34, 172, x + 34, 246, arrow=True)
        made.text(x - 42, 214, "parameters", "small soft", "end")
        made.text(x + 42, 214, "gradients", "small soft")
    made.text(380, 362, "same host: shared memory · other hosts: gRPC streams over mutual TLS", "soft", "middle")
    return made.svg()


def _rank(made: Drawing, x: float, number: int) -> None:
    made.box(x, 76, 240, 92)
    made.text(x + 14, 98, f"rank {number}", "strong")
    made.text(x + 66, 98, "your loop, on a GPU", "soft")
    for unit in range(8):
        up = unit in (2 + number, 3 + number, 4 + number)
        made.box(x + 14 + 27 * unit, 110, 23, 22, "a" if up else "empty", 3)
    made.text(x + 14, 154, "only a few units are gathered at a time", "small soft")


def _owner(made: Drawing, x: float, number: int) -> None:
    made.box(x, 250, 360, 92)
    made.text(x + 14, 272, f"optimizer actor {number}", "strong")
    made.text(x + 152, 272, "CPU memory, no GPU", "soft")
    for place, (kind, words) in enumerate((("b", "fp32 masters"), ("c", "moments"), ("d", "gradients"))):
        made.box(x + 14 + 114 * place, 284, 106, 24, kind)
        made.text(x + 67 + 114 * place, 300, words, "small on", "middle")
    made.text(x + 14, 330, "sums gradients, runs Adam, publishes new weights", "small soft")

"""What a training loop may report: the one check for a value that is reported and for one that is read from a file."""

from __future__ import annotations

import reprlib
import sys
from typing import Any

__all__ = ["fault_of"]


def fault_of(name: Any, value: Any) -> str | None:
    """Why this name and value cannot be written, read again and drawn; None if they can.

    Values are numbers, text and None. A whole number has to be one that a float can hold, because loggers and
    Prometheus have only floats; text has to be Unicode that can be encoded."""
    if not isinstance(name, str) or not _is_unicode(name):
        return f"the name {ascii(name)[:100]} is not text, or has a lone surrogate, which is no character"
    if value is None or isinstance(value, bool | float):
        return None
    if isinstance(value, int):
        # not the number itself: Python refuses to write one of more than 4,300 digits
        largest = f"a float holds at most {sys.float_info.max:.1e}"
        return None if _is_float(value) else f"{name!r} is a whole number of {value.bit_length():,} bits; {largest}"
    if isinstance(value, str):
        lone = f"{name!r} is {reprlib.repr(value)}, which has a lone surrogate, which is no character"
        return None if _is_unicode(value) else f"{lone}; decode with errors='replace'"
    return f"{name!r} is a {type(value).__name__}; metrics are numbers, text or None"


def _is_float(value: int) -> bool:
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)

"""The checkpoint that conversions begin with."""

from checkpoint.conftest import directory, written

__all__ = ["directory", "written"]

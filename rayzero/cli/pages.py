"""The page of the documentation that explains an error: the end of its line on stderr."""

from __future__ import annotations

from rayzero.errors import CheckpointError, MemoryPlanError, RayZeroError, StoreError, UnsupportedError

__all__ = ["DOCS", "PAGES", "page_of"]

DOCS = "docs/"  # where the pages are: in the repository, since no site has an address yet
PAGES: dict[type[RayZeroError], str] = {
    MemoryPlanError: "howto/tune_memory.md",
    UnsupportedError: "reference/errors.md#while-a-run-starts",
    CheckpointError: "howto/resume.md",
    StoreError: "howto/recover.md",
}


def page_of(error: RayZeroError) -> str | None:
    """The page about this kind of error; None where the message itself says all there is."""
    page = next((page for kind, page in PAGES.items() if isinstance(error, kind)), None)
    return None if page is None else DOCS + page

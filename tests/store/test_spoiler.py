"""Whoever is between two hosts and spoils what passes changes no bit: with TLS he only delays, without it he may at
most end the run in words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rayzero.errors import RayZeroError
from rayzero.security.authority import Authority
from rayzero.security.credentials import ANY_RANK, OWNER, Identity
from store.faults import Net, difference, make_spec, net, outcome, ranks_of, undisturbed
from store.spoiler import KINDS, ChunkSpoiler, Spoiler

EVERY_CHUNK = 20  # chunks a spoilt one
EVERY = {True: 40, False: 10}  # units a spoilt one, with TLS and without: there are more records than messages

RUN = Authority("spoilt", on_loopback=True)
OWNERS, RANKS = Identity(RUN.issue("optimizers", [OWNER])), Identity(RUN.issue("ranks", [ANY_RANK]))


@contextmanager
def spoilt(kind: str, *, tls: bool, most: int) -> Iterator[Net]:
    """Owners behind proxies each of which spoils so many units, and has spoilt some in all."""
    made: list[Spoiler] = []
    chunks: list[ChunkSpoiler] = []

    def proxy(target: str) -> Spoiler:
        made.append(Spoiler(target, kind, tls=tls, seed=len(made), every=EVERY[tls], most=most))
        return made[-1]

    def beside(target: str) -> Spoiler:
        chunks.append(ChunkSpoiler(target, kind, tls=tls, seed=len(chunks), every=EVERY_CHUNK, most=2))
        return chunks[-1]

    with net(make_spec(), proxy=proxy, beside=beside, **{"tls": OWNERS} if tls else {}) as owners:
        yield owners
    assert sum(each.spoilt for each in chunks) >= (3 if tls else 0)
    assert sum(each.spoilt for each in made) >= (3 if tls else 1), "in the clear, the first may end the run"


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_tls_records_that_are_spoilt_change_nothing(kind: str, tmp_path: Path) -> None:
    """The connection ends, and its calls are repeated over a new one."""
    expected, _ = undisturbed("grpc")
    with spoilt(kind, tls=True, most=2) as owners, ranks_of(owners, make_spec(), tls=RANKS) as ranks:
        assert not difference(outcome(ranks, tmp_path), expected)


@pytest.mark.spread(1)
@pytest.mark.parametrize("kind", KINDS)
def test_plain_messages_that_are_spoilt_change_no_bit_or_end_the_run_by_name(kind: str, tmp_path: Path) -> None:
    """A checksum finds what is damaged. A frame more or less than was sent shifts all that follows on its stream: then
    the end of a message may be awaited that never comes, which is a stall."""
    expected, _ = undisturbed("grpc")
    with spoilt(kind, tls=False, most=1) as owners:
        try:
            with ranks_of(owners, make_spec(), stall_timeout=3.0) as ranks:
                found = outcome(ranks, tmp_path)
        except RayZeroError:  # any other error is none of ours
            return
    assert not difference(found, expected)

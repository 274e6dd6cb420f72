"""Who fetches a shard for its host: every order of two or three ranks' moves, with deaths, and the words themselves."""

from __future__ import annotations

import ctypes
import multiprocessing
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from rayzero.store.shm import signals
from rayzero.store.shm.claims import CLAIM_BYTES, EMPTY, MOST_CLAIMERS, Claims, Move, ShardWord, next_move

# ---- the protocol, explored whole -------------------------------------------------------------------------------

WHOLE, TORN = "whole", "torn"


@dataclass(frozen=True)
class Rank:
    """One rank's place in its step, as the protocol sees it."""

    step: int = 0  # the version that it needs next
    life: int = 0
    doing: str = "looks"  # "looks", "claims" (has seen the word), "writes", "reads", "dead"
    saw: ShardWord = EMPTY


@dataclass(frozen=True)
class State:
    """A host's ranks, one shard's word and its bytes."""

    ranks: tuple[Rank, ...]
    word: ShardWord = EMPTY
    bytes: tuple[str, int] = (WHOLE, -1)  # and the content that they are of


@dataclass(frozen=True)
class Run:
    """Versions 0 to ``last``; those in ``skipped`` have the content of the version before."""

    last: int
    skipped: frozenset[int]
    deaths: int  # that may happen in all

    def content(self, version: int) -> int:
        while version in self.skipped:
            version -= 1
        return version


def successors(run: Run, state: State, died: int) -> Iterator[tuple[State, int]]:
    """Every state that one move of one rank leads to. Raises AssertionError for a move that must not happen."""
    for index, rank in enumerate(state.ranks):

        def then(change: Rank, index: int = index, **fields: object) -> State:
            ranks = (*state.ranks[:index], change, *state.ranks[index + 1 :])
            return replace(state, ranks=ranks, **fields)  # type: ignore[arg-type]

        if rank.doing != "dead" and died < run.deaths:
            yield then(replace(rank, doing="dead")), died + 1
        yield from ((each, died) for each in moves(run, state, index, rank, then))


def number(index: int, rank: Rank) -> int:
    """A rank's as a claimer: no two lives have the same one."""
    return 1 + index + 4 * rank.life


def moves(run: Run, state: State, index: int, rank: Rank, then) -> Iterator[State]:  # type: ignore[no-untyped-def]
    published = min(each.step for each in state.ranks) >= rank.step  # all have finished the step before
    content = run.content(rank.step)
    match rank.doing:
        case "dead":
            yield then(Rank(rank.step, rank.life + 1))
        case "looks" if rank.step <= run.last and published:
            yield from look(state, rank, content, then)
        case "claims":
            won = state.word == rank.saw
            claimed = ShardWord(rank.step, number(index, rank))
            yield (
                then(replace(rank, doing="writes"), word=claimed, bytes=(TORN, content))
                if won
                else then(replace(rank, doing="looks"))
            )
        case "writes":
            assert state.word == ShardWord(rank.step, number(index, rank)), "nobody takes a living rank's claim"
            yield then(replace(rank, doing="looks"), word=ShardWord(rank.step, 0), bytes=(WHOLE, content))
            yield then(replace(rank, doing="looks"), word=EMPTY)  # its fetch has failed
        case "reads":
            assert state.bytes == (WHOLE, content), f"version {rank.step} read {state.bytes}"
            yield then(Rank(rank.step + 1, rank.life))


def look(state: State, rank: Rank, content: int, then) -> Iterator[State]:  # type: ignore[no-untyped-def]
    living = {number(i, each) for i, each in enumerate(state.ranks) if each.doing != "dead"}
    move = next_move(state.word, content, rank.step, lambda claimer: claimer not in living)
    assert move is not Move.PASS, "a version that not all have read is the newest"
    if move is Move.READ:
        assert state.bytes == (WHOLE, content), f"version {rank.step} found {state.bytes}"
        yield then(replace(rank, doing="reads"))
    elif move is Move.CLAIM:
        yield then(replace(rank, doing="claims", saw=state.word))


@pytest.mark.parametrize(
    ("ranks", "run"),
    [
        (2, Run(last=3, skipped=frozenset(), deaths=2)),
        (2, Run(last=3, skipped=frozenset({1, 2}), deaths=2)),
        (3, Run(last=2, skipped=frozenset({2}), deaths=2)),
    ],
    ids=["two ranks", "skipped steps", "three ranks"],
)
def test_no_order_of_moves_reads_other_bytes_or_ends_before_all_have_read(ranks: int, run: Run) -> None:
    first = (State((Rank(),) * ranks), 0)
    known, queue, ends = {first}, deque([first]), 0
    while queue:
        state, died = queue.popleft()
        following = list(successors(run, state, died))
        if all(rank.step > run.last for rank in state.ranks):
            ends += 1
        else:
            assert following, f"nobody can move: {state}"
        for each in following:
            if each not in known:
                known.add(each)
                queue.append(each)
    assert ends > 0
    assert len(known) > 500, "many orders were tried"


def test_a_rank_that_is_behind_fetches_for_itself() -> None:
    assert next_move(ShardWord(5, 0), 4, 4, lambda _: False) is Move.PASS
    assert next_move(ShardWord(5, 2), 4, 4, lambda _: True) is Move.PASS


def test_bytes_of_an_older_version_serve_while_the_content_is_the_same() -> None:
    assert next_move(ShardWord(3, 0), 3, 6, lambda _: False) is Move.READ
    assert next_move(ShardWord(5, 0), 3, 6, lambda _: False) is Move.READ
    assert next_move(ShardWord(2, 0), 3, 6, lambda _: False) is Move.CLAIM


@pytest.mark.parametrize("word", [EMPTY, ShardWord(0, 0), ShardWord(0, MOST_CLAIMERS), ShardWord(2**47 - 2, 1)])
def test_a_word_keeps_what_it_says(word: ShardWord) -> None:
    assert 0 <= word.encode() < 2**64
    assert ShardWord.decode(word.encode()) == word


# ---- the words --------------------------------------------------------------------------------------------------

needs_signals = pytest.mark.skipif(signals.available() is not None, reason="no signals between processes here")
SHARDS = 400


def claims_over(path: Path, claimer: int) -> Claims:
    import mmap

    with path.open("r+b") as file:
        memory = (ctypes.c_ubyte * (SHARDS * CLAIM_BYTES)).from_buffer(mmap.mmap(file.fileno(), SHARDS * CLAIM_BYTES))
    return Claims(ctypes.addressof(memory), memory, claimer)


def claim_all(path: str, claimer: int, won) -> None:  # type: ignore[no-untyped-def]
    claims = claims_over(Path(path), claimer)
    for version in range(20):
        for shard in range(SHARDS):
            while (seen := claims.look(shard)).version < version:
                if seen.claimer == 0 and claims.claim(shard, seen, version):
                    won[shard * 20 + version] += 1  # a lost update would show too: only the claimer writes here
                    claims.publish(shard, version)


@needs_signals
def test_of_several_processes_one_has_each_shard_of_a_version(tmp_path: Path) -> None:
    words = tmp_path / "words"
    words.write_bytes(bytes(SHARDS * CLAIM_BYTES))
    there = multiprocessing.get_context("fork")
    won = there.RawArray("i", SHARDS * 20)
    processes = [there.Process(target=claim_all, args=(str(words), number, won)) for number in (1, 2, 3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert set(won) == {1}
    assert {claims_over(words, 9).look(shard) for shard in range(SHARDS)} == {ShardWord(19, 0)}


@needs_signals
def test_what_is_outdated_is_fetched_again_and_what_is_being_written_is_its_writers(tmp_path: Path) -> None:
    words = tmp_path / "words"
    words.write_bytes(bytes(SHARDS * CLAIM_BYTES))
    one, other = claims_over(words, 1), claims_over(words, 2)
    assert one.claim(0, EMPTY, 7)
    assert not other.claim(0, EMPTY, 7)
    other.forget(0)
    other.void(SHARDS, 2)
    assert one.look(0) == ShardWord(7, 1)
    one.publish(0, 7)
    assert other.look(0) == ShardWord(7, 0)
    other.forget(0)
    assert one.look(0) == EMPTY
    assert other.claim(0, EMPTY, 7)
    one.void(SHARDS, 2)
    assert one.look(0) == EMPTY

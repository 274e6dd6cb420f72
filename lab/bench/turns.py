"""Lets contestants work in turn. Each has its own processes, which stay up and wait while the others work.

A player is one rank of a contestant. Its process calls :func:`take_turns`, which builds the player and then plays every
:class:`Turn` that it receives. The ranks of a contestant play at the same time; contestants never do.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from threading import Event, Thread
from typing import Any, Protocol

import torch

from lab.bench.figures import resident_bytes
from rayzero.errors import RunFailedError

_SAMPLE_S = 0.05  # between two samples of resident memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Steps ``first`` (not timed) to ``first + steps``, and the value that the benchmark varies."""

    first: int = 0
    steps: int = 1
    what: str = "steps"  # or other work that the benchmark's players can do
    setting: float = 0.0
    pids: tuple[int, ...] = ()  # the contestant's processes that are not ranks


class Player(Protocol):
    """One rank of a contestant."""

    def play(self, turn: Turn) -> dict[str, Any]:
        """Work, and return ``seconds`` of the timed steps together and whatever else was measured."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One rank's place: where it works and how it receives its turns. Sent to that rank's process."""

    rank: int
    world_size: int
    threads: int
    pipe: Connection
    device: str = "cpu"
    meeting: str = ""  # a file through which torch.distributed's ranks find each other; "": there is no group


Program = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A contestant to be started: its name, and the picklable programs of its processes, given its ranks' seats."""

    name: str
    programs: Callable[[Sequence[Seat]], list[Program]]


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The reason why a contestant cannot take part here."""

    reason: str


def take_turns(build: Callable[[Seat], Player], seat: Seat) -> None:
    """Run a rank: build the player, then play until told to end. An error is sent in place of a result."""
    try:
        _load_what_training_loads()
        base = resident_bytes(os.getpid())
        player = build(seat)
        seat.pipe.send((os.getpid(), base))
        while (turn := seat.pipe.recv()) is not None:
            seat.pipe.send(player.play(turn))
    except EOFError:
        return  # the process that asks has ended
    except ImportError as exc:  # a peer that is not installed
        seat.pipe.send(_Refusal(str(exc)))
    except Exception as exc:
        seat.pipe.send(_Refusal(f"{type(exc).__name__}: {str(exc).partition(chr(10))[0]}"))
        raise


def _load_what_training_loads() -> None:
    """Take one tiny step: torch imports half of itself at the first one, which must not count as the contestant's
    memory."""
    layer = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    layer(torch.ones(1, 8, dtype=torch.float32, device="cpu")).sum().backward()
    torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    optimizer.step()


@dataclass(slots=True)
class Contestant:
    """An entry whose processes are up."""

    name: str
    processes: list[BaseProcess]
    pipes: list[Connection]
    rank_pids: list[int] = field(default_factory=list)
    base_bytes: int = 0  # resident in the ranks' processes before anything was built

    def begin(self) -> None:
        """Wait until every rank is built. Raises RunFailedError, with the reason, if one cannot be built."""
        hellos = self._answers()
        self.rank_pids = [pid for pid, _ in hellos]
        self.base_bytes = sum(base for _, base in hellos)

    def play(self, turn: Turn) -> list[dict[str, Any]]:
        """Play a turn; returns every rank's result, by rank. Raises RunFailedError if a rank fails."""
        for pipe in self.pipes:
            pipe.send(replace(turn, pids=tuple(self.owner_pids)))
        return self._answers()

    @property
    def owner_pids(self) -> list[int]:
        """Ids of the processes that are not ranks."""
        return [p.pid for p in self.processes if p.pid is not None and p.pid not in self.rank_pids]

    def peak_bytes(self, turn: Turn) -> tuple[int, int]:
        """(most resident bytes of all ranks together, most of the other processes) sampled while ``turn`` is
        played."""
        most = [0, 0]
        over = Event()

        def look() -> None:
            ended = False
            while not ended:
                ended = over.wait(_SAMPLE_S)  # take one more sample after the end
                for i, pids in enumerate((self.rank_pids, self.owner_pids)):
                    most[i] = max(most[i], sum(resident_bytes(pid) for pid in pids))

        looking = Thread(target=look)
        looking.start()
        try:
            self.play(turn)
        finally:
            over.set()
            looking.join()
        return most[0], most[1]

    def end(self) -> None:
        """Tell the ranks to end and wait for the processes; terminate those that do not end within 30 seconds."""
        for pipe in self.pipes:
            try:
                pipe.send(None)
            except BrokenPipeError:
                continue  # it has ended already
        for process in self.processes:
            process.join(30)
            if process.is_alive():
                process.terminate()
                process.join()

    def _answers(self) -> list[Any]:
        answers = []
        for rank, pipe in enumerate(self.pipes):
            try:
                answers.append(pipe.recv())
            except (EOFError, ConnectionResetError):
                answers.append(_Refusal(f"the process of rank {rank} died"))
        refused = [answer.reason for answer in answers if isinstance(answer, _Refusal)]
        if refused:
            raise RunFailedError(f"{self.name}: {refused[0]}")
        return answers


def seat_contestant(
    entry: Entry, world_size: int, threads: int, *, device: str = "cpu", meeting: str = ""
) -> Contestant:
    """Start an entry's processes; ``begin()`` waits for them."""
    spawn = multiprocessing.get_context("spawn")
    pairs = [spawn.Pipe() for _ in range(world_size)]
    seats = [
        Seat(rank=rank, world_size=world_size, threads=threads, pipe=theirs, device=device, meeting=meeting)
        for rank, (_, theirs) in enumerate(pairs)
    ]
    processes: list[BaseProcess] = [spawn.Process(target=program, name=entry.name) for program in entry.programs(seats)]
    for process in processes:
        process.start()
    for _, theirs in pairs:
        theirs.close()
    return Contestant(entry.name, processes, [ours for ours, _ in pairs])


@contextmanager
def contest(
    entries: Sequence[Entry], world_size: int, threads: int, *, folder: str, device: str = "cpu"
) -> Iterator[tuple[list[Contestant], dict[str, str]]]:
    """Start the contestants; yields (those that are ready, why the others cannot take part), and ends them afterwards.
    ``folder``: an empty folder for meeting files."""
    there: list[Contestant] = []
    absent: dict[str, str] = {}
    try:
        for i, entry in enumerate(entries):
            contestant = seat_contestant(
                entry, world_size, threads, device=device, meeting=os.path.join(folder, f"meeting-{i}")
            )
            try:
                contestant.begin()
            except RunFailedError as exc:
                absent[entry.name] = str(exc).removeprefix(f"{entry.name}: ")
                contestant.end()
            else:
                there.append(contestant)
        yield there, absent
    finally:
        for contestant in there:
            contestant.end()

"""The thread that computes."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from rayzero.owner.shard import Updater


def test_tasks_run_in_order_with_the_threads_asked_for() -> None:
    seen: list[object] = []
    errors: list[BaseException] = []
    before = torch.get_num_threads()
    updater = Updater("test", before + 2, errors.append)
    for index in range(5):
        updater.submit(lambda index=index: seen.append((index, torch.get_num_threads())))  # type: ignore[misc]
    updater.close()
    updater.close()
    assert seen == [(index, before + 2) for index in range(5)]
    assert torch.get_num_threads() == before
    assert not errors


def test_a_count_set_elsewhere_does_not_reach_its_tasks() -> None:
    counts: list[int] = []
    before = torch.get_num_threads()
    updater = Updater("test", 3, lambda exc: None)
    held = threading.Event()
    updater.submit(lambda: counts.append(torch.get_num_threads()))
    updater.submit(lambda: held.wait(20) and None)
    updater.submit(lambda: counts.append(torch.get_num_threads()))
    try:
        torch.set_num_threads(1)
        held.set()
        updater.close()
    finally:
        torch.set_num_threads(before)
    assert counts == [3, 3]


def test_its_count_is_its_threads_and_never_the_process_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.set_num_threads sets MKL's one count a process, too: products that other threads compute just then would be
    cut, and round, differently."""
    counts: list[int] = []
    asked: list[int] = []
    before = torch.get_num_threads()
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    updater = Updater("test", before + 1, lambda exc: None)
    updater.submit(lambda: counts.append(torch.get_num_threads()))
    updater.close()
    assert (counts, asked) == ([before + 1], [])


def test_an_idle_thread_runs_its_idle_task_once_after_each_pause() -> None:
    seen: list[str] = []
    rested, again = threading.Event(), threading.Event()
    updater = Updater("test", 1, lambda exc: seen.append(repr(exc)))

    def rest() -> None:
        seen.append("rest")
        updater.when_idle(0.0, later)
        rested.set()

    def later() -> None:
        seen.append("later")
        again.set()

    def task() -> None:
        seen.append("task")
        updater.when_idle(0.0, rest)  # here: a thread that starts late would rest before its first task

    updater.submit(task)
    assert rested.wait(20)
    time.sleep(0.05)
    assert seen == ["task", "rest"]
    updater.submit(lambda: seen.append("next"))
    assert again.wait(20)
    updater.close()
    assert seen == ["task", "rest", "next", "later"]


def test_a_task_that_raises_is_told_and_the_next_one_runs() -> None:
    seen: list[str] = []
    updater = Updater("test", 1, lambda exc: seen.append(repr(exc)))

    def broken() -> None:
        raise ValueError("no")

    updater.submit(broken)
    updater.submit(lambda: seen.append("next"))
    updater.close()
    assert seen == ["ValueError('no')", "next"]

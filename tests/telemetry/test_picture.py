"""What ``rayzero top`` makes of two scrapes: written-out pages in, numbers and text out."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace

import pytest
from rich.console import Console

from rayzero.cli.top_view import render
from rayzero.engine.step_clock import _WAITS
from rayzero.telemetry.metric import Role
from rayzero.telemetry.picture import CAUSES, PHASES, RESULTS, Bar, FollowersRow, Picture, _pair, draw_from, keep
from rayzero.telemetry.scrape import Scrape, Scraped, Target, parse_series

NODE = "10.0.0.1"
RANK, OWNER, COORDINATOR = Role.RANK, Role.OPTIMIZER, Role.COORDINATOR


def page(values: Mapping[str, float]) -> str:
    return "".join(f"{name} {value}\n" for name, value in values.items())


def process(role: Role, index: int | None, values: Mapping[str, float] | None, error: str | None = None) -> Scraped:
    target = Target(address=f"{NODE}:{(index or 0) + 1}", run="demo", role=role, node=NODE, index=index)
    return Scraped(target=target, series=None if values is None else parse_series(page(values)), error=error)


def rank(step: int, seconds: float, tokens: int, **more: float) -> dict[str, float]:
    return {
        "rayzero_step": step,
        "rayzero_step_seconds_sum": seconds,
        "rayzero_step_seconds_count": step,
        "rayzero_tokens_total": tokens,
        "rayzero_train_loss": 3.0 - step / 10,
        "rayzero_last_step_timestamp_seconds": 990.0 + step,
        'rayzero_exposed_wait_seconds_total{cause="fetch"}': seconds / 10,
        'rayzero_exposed_wait_seconds_total{cause="optimizer"}': seconds / 4,
        'rayzero_step_phase_seconds_sum{phase="forward"}': seconds / 4,
        'rayzero_step_phase_seconds_count{phase="forward"}': step,
        'rayzero_step_phase_seconds_sum{phase="backward"}': seconds / 2,
        'rayzero_step_phase_seconds_count{phase="backward"}': step,
        'rayzero_prefetch_requests_total{result="hit"}': step * 6,
        'rayzero_prefetch_requests_total{result="late"}': step * 2,
        "rayzero_prefetch_window_bytes": 3 << 20,
        "rayzero_prefetch_window_limit_bytes": 4 << 20,
        'rayzero_process_memory_bytes{kind="pss"}': 1 << 30,
        'rayzero_host_memory_limit_bytes{source="ram"}': 64 << 30,
        'rayzero_host_memory_limit_bytes{source="ray"}': 60 << 30,
        "rayzero_host_memory_headroom_bytes": 15 << 30,
        "rayzero_shm_used_bytes": 31 << 30,
        "rayzero_shm_limit_bytes": 32 << 30,
    } | more


def owner(updates: int) -> dict[str, float]:
    return {
        "rayzero_optimizer_update_seconds_sum": updates * 0.25,
        "rayzero_optimizer_update_seconds_count": updates,
        "rayzero_optimizer_memory_bytes_processed_total": updates * 1e9,
        "rayzero_host_bandwidth_limit_bytes_per_second": 8e9,
        "rayzero_optimizer_queue_depth": 3,
        "rayzero_optimizer_threads": 2,
        "rayzero_optimizer_cores": 8,
        "rayzero_param_version": updates,
        "rayzero_shards": 5,
    }


BEFORE = Scrape(
    at=1000.0,
    processes=(
        process(COORDINATOR, None, {'rayzero_heartbeat_age_seconds{process="rank 1"}': 1.0}),
        process(OWNER, 0, owner(10)),
        process(RANK, 0, rank(10, 5.0, 1000)),
        process(RANK, 1, rank(10, 8.0, 1000)),
    ),
)
NOW = Scrape(
    at=1004.5,
    processes=(
        process(COORDINATOR, None, {'rayzero_heartbeat_age_seconds{process="rank 1"}': 12.0}),
        process(OWNER, 0, owner(14)),
        process(RANK, 0, rank(14, 7.0, 1400, rayzero_eta_seconds=3725.0)),
        process(RANK, 1, rank(13, 11.0, 1300)),
    ),
)


def seen(picture: Picture, width: int = 80) -> str:
    """What a terminal without colours shows."""
    file = io.StringIO()
    Console(file=file, width=width).print(render(picture, state="running", steps=20))
    return file.getvalue()


def row(text: str, who: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith(who + "  "))
    return line.split()


def test_speeds_are_differences_divided_by_the_steps_that_ended_in_between() -> None:
    picture = draw_from("demo", BEFORE, NOW)
    assert (picture.step, picture.steps, picture.span) == (13, 4, 4.5)
    assert picture.loss == pytest.approx((1.6 + 1.7) / 2)
    assert picture.tokens_per_second == pytest.approx(400 / 2 + 300 / 3)
    assert picture.step_seconds == pytest.approx((0.5 + 1.0) / 2)
    assert picture.eta_seconds == 3725
    assert picture.since_step == pytest.approx(0.5)
    assert [one.step_seconds for one in picture.ranks] == [0.5, 1.0]
    assert picture.ranks[1].waits == pytest.approx({"fetch": 0.1, "push": 0, "norm": 0, "optimizer": 0.25})
    assert picture.ranks[0].prefetch == {"hit": 24, "late": 8, "miss": 0}
    assert {phase: seconds for phase, seconds in picture.phases.items() if seconds} == pytest.approx(
        {"forward": 0.75 / 4, "backward": 0.75 / 2}
    )
    (first,) = picture.owners
    assert (first.update_seconds, first.queue, first.efficiency) == (0.25, 3, pytest.approx(0.5))
    assert (first.threads, first.cores, first.version, first.shards) == (2, 8, 14, 5)
    assert picture.late == {"rank 1": 12.0}


def test_what_a_loop_reports_is_shown_by_name_as_the_mean_of_its_ranks() -> None:
    told = [{f'rayzero_reported{{name="{name}"}}': value for name, value in one.items()} for one in (
        {"accuracy": 0.5, "loss": 1.0, "step": 7.0}, {"accuracy": 1.0, "val loss": 2.25},
    )]  # fmt: skip
    ranks = (process(RANK, 0, rank(10, 5.0, 1000, **told[0])), process(RANK, 1, rank(10, 5.0, 1000, **told[1])))
    picture = draw_from("demo", None, Scrape(at=1000.0, processes=ranks))
    assert picture.reported == {"accuracy": 0.75, "val loss": 2.25}
    assert "\nreported  accuracy 0.75  val loss 2.25\n" in seen(picture)
    assert "reported" not in seen(draw_from("demo", BEFORE, NOW))


def test_memory_is_told_of_its_limits() -> None:
    """A node's limit is the lowest; what is in use is what leaves the headroom."""
    assert draw_from("demo", BEFORE, NOW).bars == (
        Bar(what="10.0.0.1 memory", used=45 << 30, limit=60 << 30),
        Bar(what="10.0.0.1 shared memory", used=31 << 30, limit=32 << 30),
        Bar(what="rank 0 host", used=1 << 30, limit=60 << 30),
        Bar(what="rank 0 gathered", used=3 << 20, limit=4 << 20),
        Bar(what="rank 1 host", used=1 << 30, limit=60 << 30),
        Bar(what="rank 1 gathered", used=3 << 20, limit=4 << 20),
    )


def test_where_no_step_ended_in_between_the_means_are_since_the_start_and_it_says_so() -> None:
    later = Scrape(at=1100.0, processes=BEFORE.processes)
    picture = draw_from("demo", BEFORE, later)
    assert (picture.span, picture.steps, picture.since_step) == (None, 0, 100.0)
    assert picture.ranks[0].step_seconds == 0.5
    assert picture.tokens_per_second == pytest.approx(1000 / 5 + 1000 / 8)
    assert "since the start: no step ended between two scrapes; the last one 100 s ago" in seen(picture)
    assert draw_from("demo", None, BEFORE).ranks == picture.ranks


def test_a_process_that_has_begun_anew_counts_from_its_start() -> None:
    again = Scrape(at=1004.5, processes=(process(RANK, 0, rank(2, 4.0, 200)), NOW.processes[3]))
    first = draw_from("demo", BEFORE, again).ranks[0]
    assert (first.step_seconds, first.prefetch["hit"]) == (2.0, 12)


def test_a_process_that_does_not_answer_is_named_and_the_others_are_shown() -> None:
    mute = process(RANK, 1, None, "no answer within 2 s")
    picture = draw_from("demo", BEFORE, Scrape(at=1004.5, processes=(*NOW.processes[:3], mute)))
    assert [one.who for one in picture.ranks] == ["rank 0"]
    assert picture.silent == {"rank 1": "no answer within 2 s"}
    assert "rank 1 does not answer: no answer within 2 s" in seen(picture)
    nobody = draw_from("demo", None, Scrape(at=1.0, processes=(mute,)))
    assert (nobody.step, nobody.loss, nobody.tokens_per_second, nobody.bars) == (None, None, None, ())
    assert "demo  running  step - of 20  loss -" in seen(nobody)
    assert ("No process answers" in seen(nobody), "No process answers" in seen(picture)) == (True, False)


def test_an_owner_beside_a_rank_is_among_the_owners() -> None:
    both = process(RANK, 0, rank(10, 5.0, 1000) | owner(8))
    picture = draw_from("demo", None, Scrape(at=1.0, processes=(*BEFORE.processes[:2], both)))
    assert [(one.who, one.version) for one in picture.owners] == [("optimizer 0", 10), ("beside rank 0", 8)]
    idle = process(OWNER, 1, {"rayzero_shards": 2})
    (only,) = draw_from("demo", None, Scrape(at=1.0, processes=(idle,))).owners
    assert (only.who, only.update_seconds, only.shards) == ("optimizer 1", None, 2)


def test_followers_are_a_row_if_there_are_some() -> None:
    def followed(count: int, lag: int, changes: int, whole: int) -> dict[str, float]:
        return {
            "rayzero_followers": count,
            "rayzero_follower_lag_versions": lag,
            'rayzero_follow_bytes_total{form="changes"}': changes,
            'rayzero_follow_bytes_total{form="whole"}': whole,
        }

    def scraped(at: float, step: int, first: dict[str, float], second: dict[str, float]) -> Scrape:
        owners = (process(OWNER, 0, owner(step) | first), process(OWNER, 1, owner(step + 1) | second))
        return Scrape(at=at, processes=(*owners, process(RANK, 0, rank(step, 1.0, 1))))

    before = scraped(1000.0, 10, followed(1, 0, 1 << 20, 5 << 20), {})
    now = scraped(1002.0, 14, followed(2, 0, 3 << 20, 5 << 20), followed(1, 3, 1 << 20, 1 << 20))
    picture = draw_from("demo", before, now)
    assert picture.followers == FollowersRow(
        count=2, version=11, newest=14, change_bytes=3 << 20, whole_bytes=1 << 20
    ), "each follower takes shards of every owner, and one of them has just met the second"
    lines = seen(picture).splitlines()
    (head,) = (at for at, line in enumerate(lines) if line.startswith("followers  "))
    assert lines[head + 1].split() == ["2", "11", "14", "3", "3", "MiB", "1", "MiB"]
    gone = draw_from("demo", now, scraped(1004.0, 16, followed(0, 0, 3 << 20, 5 << 20), {}))
    assert (gone.followers, "followers" in seen(gone)) == (None, False)
    assert "followers" not in seen(draw_from("demo", BEFORE, NOW))


def test_who_joined_late_stands_beside_others_of_its_kind() -> None:
    joined = (process(OWNER, 0, owner(1)), process(RANK, 0, rank(1, 1.0, 1)), process(OWNER, 1, owner(1)))
    found = [one.target.who for one in _pair(None, Scrape(at=1001.0, processes=joined))]
    assert found == ["optimizer 0", "optimizer 1", "rank 0"]


def test_the_screen_of_eighty_columns() -> None:
    text = seen(draw_from("demo", BEFORE, NOW))
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("demo  running  step 13 of 20  loss 1.6500  300 tokens/s  750 ms a step")
    assert "4 steps in the last 4.5 s; the last one 500 ms ago; 1:02:05 left" in text
    assert "phase  " + "F" * 20 + "B" * 40 + "\n" in text.replace(" \n", "\n")
    assert row(text, "rank 1") == [
        "rank", "1", "13", "1.7000", "1", "s", "10.0%", "0.0%", "0.0%", "25.0%", "18", "6", "0",
    ]  # fmt: skip
    assert row(text, "optimizer 0") == ["optimizer", "0", "250", "ms", "3", "2", "of", "8", "50%", "14", "5"]
    assert row(text, "10.0.0.1 shared memory")[3:] == ["#" * 29 + ".", "97%", "31", "GiB", "of", "32", "GiB"]
    assert "the coordinator has not heard from rank 1 for 12 s" in text


def test_of_many_ranks_those_that_waited_longest_are_shown() -> None:
    slow = {23: 9.0, 31: 8.0}
    processes = [process(RANK, index, rank(10, slow.get(index, 1.0), 1000)) for index in range(40)]
    text = seen(draw_from("demo", None, Scrape(at=1.0, processes=tuple(processes))))
    rows = [line for line in text.splitlines() if line.startswith("rank ") and "%" in line and "of" not in line]
    assert len(rows) == 16
    assert {"rank 23", "rank 31"} <= {line[:7] for line in rows}
    assert "… and 24 ranks that waited less" in text


def test_the_picture_reaches_back_over_the_window_and_over_one_step_at_least() -> None:
    def at(second: float, steps: int) -> Scrape:
        return Scrape(at=second, processes=(process(RANK, 0, rank(steps, 1.0, 1)),))

    kept: tuple[Scrape, ...] = ()
    for second in range(0, 30, 2):
        kept = keep((*kept, at(second, 5 + second)), window_s=10)
    assert (kept[0].at, kept[-1].at) == (18, 28)
    for second in range(30, 300, 2):  # it hangs: what it did last stays in sight
        kept = keep((*kept, at(second, 33)), window_s=10)
    assert kept[0].at == 26
    assert len(kept) == 60
    kept = keep((*kept, at(300, 34)), window_s=10)
    assert kept[0].at == 290


def test_what_is_shown_is_all_that_ranks_tell() -> None:
    assert set(CAUSES) == {cause for cause, phase in _WAITS.items() if phase != "data"}
    assert set(_WAITS.values()) < set(PHASES)
    assert len(PHASES) == 8
    assert RESULTS == ("hit", "late", "miss")


def test_nothing_that_a_process_says_reaches_the_terminal_as_a_control_character_or_as_markup() -> None:
    rude = "\x1b[31m\x9b2J\n[/red]\r"
    picture = draw_from(rude, BEFORE, NOW)
    picture = replace(
        picture,
        reported={rude: 1.5},
        ranks=(replace(picture.ranks[0], who=rude),),
        owners=(replace(picture.owners[0], who=rude),),
        bars=(replace(picture.bars[0], what=rude),),
        silent={rude: rude},
        late={rude: 11.0},
    )
    file = io.StringIO()
    Console(file=file, width=200).print(render(picture, state=rude, steps=20))
    text = file.getvalue()
    assert text.count(r"\x1b[31m\x9b2J\n[/red]\r") == 9
    assert all(line.isprintable() for line in text.split("\n"))

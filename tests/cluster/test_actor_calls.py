"""What a call to a process has come to: its answer, or a failure that names the process; without a cluster."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from rayzero.cluster import actor_calls as module
from rayzero.cluster.actor_calls import ask, ask_config, failure_from_ray, failure_of_call
from rayzero.cluster.run import Member
from rayzero.errors import ConfigError, RunFailedError

RANK = Member(who="rank 1", pid=7, node="n", host="h")
DIED = "The actor died. Worker exit detail: Worker got SIGKILL.\n  It is gone. Some common causes include: many."


def raised(error: Exception) -> ray.exceptions.RayTaskError:
    return ray.exceptions.RayTaskError("serve", "Traceback\n...", error)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What calls answer, by call; those that are not there are late."""
    found: dict[str, Any] = {}

    def get(call: str) -> Any:
        if isinstance(found[call], Exception):
            raise found[call]
        return found[call]

    def answered(calls: list[str], timeout_s: float) -> tuple[list[str], list[str]]:
        return [call for call in calls if call in found], [call for call in calls if call not in found]

    monkeypatch.setattr(module.ray, "get", get)
    monkeypatch.setattr(module, "answered", answered)
    return found


def test_who_is_late_is_named(answers: dict[str, Any]) -> None:
    answers["a"] = 1
    with pytest.raises(RunFailedError, match=r"^run 'demo' failed: rank 1, rank 2 gave no answer within 5 s$"):
        ask("demo", {"rank 0": "a", "rank 1": "b", "rank 2": "c"}, {}, 5.0)


def test_who_fails_is_named_before_who_is_late_and_its_error_is_the_cause(answers: dict[str, Any]) -> None:
    answers |= {"b": raised(ValueError("boom")), "c": ray.exceptions.ActorDiedError()}
    with pytest.raises(RunFailedError) as failed:
        ask("demo", {"rank 0": "a", "rank 1": "b", "rank 2": "c"}, {}, 5.0)
    first, then, *_ = str(failed.value).splitlines()
    assert first == "run 'demo' failed: rank 1 raised ValueError: boom"
    assert then.startswith("  then: rank 2 died: its process ended unexpectedly.")
    assert isinstance(failed.value.__cause__, ValueError)


@pytest.mark.parametrize(("error", "kind"), [(ConfigError("no port"), ConfigError), (OSError("no"), RunFailedError)])
def test_what_a_process_finds_wrong_with_the_config_is_raised_as_it_is(
    answers: dict[str, Any], error: Exception, kind: type[Exception]
) -> None:
    answers["a"] = raised(error)
    with pytest.raises(kind):
        ask_config("demo", {"rank 0": "a"}, {}, 5.0)


def test_a_death_has_its_pid_and_rays_reason_alone() -> None:
    died = failure_from_ray("rank 1", ray.exceptions.RayError(DIED), RANK)
    assert died.what == "died: its process (pid 7) ended unexpectedly. Worker got SIGKILL. It is gone."
    assert died.restarts
    assert "pid" not in failure_from_ray("rank 1", ray.exceptions.RayError(DIED), None).what


def test_a_constructor_that_raises_is_no_death(answers: dict[str, Any]) -> None:
    answers["a"] = ray.exceptions.RayActorError()
    answers["a"].args = (raised(ValueError("boom")),)
    failure = failure_of_call("rank 1", "a", RANK)
    assert failure is not None
    assert failure.what == "raised ValueError: boom"
    answers["a"] = "an answer"
    assert failure_of_call("rank 1", "a", RANK) is None

"""A run whose processes were all killed goes on from what they left in shared memory, with the bits of any other."""

from __future__ import annotations

import copy
import functools
import random
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rayzero.cluster.continuation import Continuation, Lost, choose, read_left
from rayzero.errors import HandshakeError
from rayzero.slabs.sweep import SHARED_MEMORY, list_slabs, sweep
from tests.support import needs

from .test_comeback import base, loop, run, same
from .whole_run import LINEAGE, RUN, WholeRun

pytestmark = [
    pytest.mark.usefixtures("one_torch_thread"),
    needs.shared_memory,
]


@pytest.fixture
def slab_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="test-") as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("plain"))


def goes_on(directory: Path, num_owners: int = 2) -> Continuation:
    found = choose(read_left(RUN, LINEAGE, directory), num_workers=2, num_owners=num_owners)
    assert isinstance(found, Continuation), found
    return found


@pytest.mark.spread(1)
@pytest.mark.parametrize("kills", [1, 4])
def test_a_run_that_is_killed_at_any_moment_ends_with_the_same_bits(
    kills: int, undisturbed: Any, slab_dir: Path, tmp_path: Path
) -> None:
    draw, one = random.Random(7), functools.partial(loop, base=base(), folder=tmp_path)
    found: Continuation | Lost = Lost(why="it has not begun")
    for _ in range(kills):
        whole = WholeRun(one, slab_dir, found if isinstance(found, Continuation) else None)
        time.sleep(0.5 + draw.random() * 0.7)
        whole.kill()
        found = choose(read_left(RUN, LINEAGE, slab_dir), num_workers=2, num_owners=2)
        if isinstance(found, Lost):
            early = "had decided no step|nothing of it is left|never had values|left nothing on this host"
            assert re.search(early, found.why), found.why
            sweep(slab_dir)
    results = WholeRun(one, slab_dir, found if isinstance(found, Continuation) else None).results()
    assert [life for life, _ in results] == [getattr(found, "life", 0)] * 2
    assert same(results, undisturbed)


def killed_once(directory: Path, folder: Path, **more: Any) -> None:
    one = functools.partial(loop, base=base(), folder=folder, at=(("fetch", 2),), processes=True, **more)
    whole = WholeRun(one, directory)
    whole.wait_for_a_death()
    whole.kill()


def test_only_the_same_model_of_the_same_lineage_goes_on(undisturbed: Any, slab_dir: Path, tmp_path: Path) -> None:
    killed_once(slab_dir, tmp_path)
    found, left = goes_on(slab_dir), [slab.path for slab in list_slabs(slab_dir)]
    assert read_left(RUN, "another", slab_dir).run is None
    larger = copy.deepcopy(base())
    larger.more = torch.nn.Linear(3, 3)
    other = functools.partial(loop, base=larger, folder=tmp_path)
    with pytest.raises(
        HandshakeError, match=r"has layout .* resume from a checkpoint by name \(run.resume=CHECKPOINT\)"
    ):
        WholeRun(other, slab_dir, found).results()
    assert [slab.path for slab in list_slabs(slab_dir)] == left, "what is refused stays"
    one = functools.partial(loop, base=base(), folder=tmp_path)
    anew = Continuation(step=0, life=0, repeats=False)
    assert same(WholeRun(one, slab_dir, anew, lineage="another").results(), undisturbed)


def test_a_loop_that_tracks_nothing_cannot_go_on(slab_dir: Path, tmp_path: Path) -> None:
    killed_once(slab_dir, tmp_path, tracks=False)
    found = choose(read_left(RUN, LINEAGE, slab_dir), num_workers=2, num_owners=2)
    assert isinstance(found, Lost)
    said = r"the state of the loop at step \d+ was not kept on ranks 0, 1; loops that call rayzero.track\(\) are kept"
    assert re.fullmatch(said, found.why)

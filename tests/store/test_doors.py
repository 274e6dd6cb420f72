"""An owner without shards, on a host whose ranks have no other: it serves, computes nothing, and loses nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rayzero.protocol.ownership import Ownership
from rayzero.slabs.sweep import SHARED_MEMORY, list_slabs
from rayzero.store.owner.hosted import HostedModels
from rayzero.store.owner.server import serve_models
from rayzero.store.rank.rank_store import RankStore
from rayzero.store.remote.remote_connection import RankTerms, RemoteConnection
from rayzero.store.shm.recovery import Outcome, assess, read_run
from rayzero.telemetry.names import PARAM_VERSION, SHARDS
from rayzero.telemetry.recorder import MemoryRecorder
from tests.support import needs

from .stores import TOKEN
from .toy import Rank, make_spec, masters, random_grads, start, take_step

pytestmark = needs.signals_between_processes

OWNERSHIP = Ownership(3, doors=1)
DOOR = 2


def hosted(
    owner: int, directory: Path, recorder: MemoryRecorder | None = None, *, succeeds: bool = False
) -> HostedModels:
    return HostedModels(owner, 3, ownership=OWNERSHIP, share=directory, recorder=recorder, succeeds=succeeds)


def connect(
    stack: ExitStack, here: Path, places: Sequence[Path | None], recorder: MemoryRecorder
) -> list[RemoteConnection]:
    """Connections of ranks, which share memory in ``places``, to a door in ``here`` and to owners on another host."""
    models = [hosted(owner, SHARED_MEMORY) for owner in range(DOOR)] + [hosted(DOOR, here, recorder)]
    servers = []
    for each in models:
        stack.callback(each.close)
        servers.append(stack.enter_context(serve_models(each, token=TOKEN)))
    addresses = [server.address for server in servers]
    for server in servers:
        server.connect_peers(addresses)
    return [
        RemoteConnection(rank, addresses, RankTerms(token=TOKEN, share=place), OWNERSHIP)
        for rank, place in enumerate(places)
    ]


def begin(stack: ExitStack, connections: Sequence[RemoteConnection]) -> list[Rank]:
    stores = [RankStore(connection) for connection in connections]
    for store in stores:
        stack.callback(store.close)
    return start(stores, make_spec(len(stores)))


def ranks_beside_a_door(stack: ExitStack, here: Path, recorder: MemoryRecorder) -> list[Rank]:
    """Two ranks whose host, ``here``, has a door; their owners are on another one."""
    return begin(stack, connect(stack, here, (here, here), recorder))


def test_a_door_has_no_shards_and_no_version_that_could_be_behind(stack: ExitStack, slab_dir: Path) -> None:
    recorder = MemoryRecorder()
    ranks = ranks_beside_a_door(stack, slab_dir, recorder)
    take_step(ranks, [random_grads(ranks[0].spec, rank) for rank in range(2)])
    assert masters(ranks[0])
    gauges = recorder.gauges()
    assert list(gauges[SHARDS].values()) == [0]
    assert PARAM_VERSION not in gauges


def test_ranks_have_links_to_owners_with_shards_and_to_the_door_of_their_host(stack: ExitStack, slab_dir: Path) -> None:
    """Rank 0 is beside the door, rank 1 on a host without: it asks the door once which host that is on."""
    connections = connect(stack, slab_dir, (slab_dir, None), MemoryRecorder())
    ranks = begin(stack, connections)
    take_step(ranks, [random_grads(ranks[0].spec, rank) for rank in range(2)])
    assert [sorted(connection._links) for connection in connections] == [[0, 1, DOOR], [0, 1]]


def test_what_a_door_leaves_is_no_part_of_what_a_dead_run_has(stack: ExitStack, slab_dir: Path) -> None:
    """On its host, it is the run's only owner; and the owners' host can go on without it."""
    ranks = ranks_beside_a_door(stack, slab_dir, MemoryRecorder())
    take_step(ranks, [random_grads(ranks[0].spec, rank) for rank in range(2)])
    ranks[0].fetch(1)
    run = ranks[0].spec.run
    left = [slab for slab in list_slabs(SHARED_MEMORY) if slab.header is not None and slab.header.facts.run == run]
    found = read_run(run, left)
    assert found is not None
    assert (found.ownership, assess(found).outcome) == (OWNERSHIP, Outcome.WHOLE)


def test_a_successor_of_a_door_serves_without_anything_left(stack: ExitStack, slab_dir: Path) -> None:
    models = hosted(DOOR, slab_dir, succeeds=True)
    stack.callback(models.close)
    attached = models[0].service.attach(0, make_spec(1), own_gradients=True)
    assert (attached.version, attached.needs_load) == (0, False)
    assert models[0].shared is not None
    assert Path(models[0].shared.offer().control).exists()

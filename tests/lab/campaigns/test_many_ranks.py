"""Two hundred ranks of ``lab/campaigns/many_ranks.py`` over a real server: each sends what a rank's store sends."""

from __future__ import annotations

import asyncio

import pytest

from lab.campaigns.many_ranks import TOKEN, Case, FakeRank
from rayzero.concurrency.event_loop import shared_loop
from rayzero.store.owner.hosted import HostedModels
from rayzero.store.owner.server import serve_models
from rayzero.store.wire import translate

pytestmark = pytest.mark.thorough

RANKS = 200
WAIT = 60.0


def test_two_hundred_ranks_attach_with_one_spec_and_take_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Case(ranks=RANKS, owners=1, units=3, steps=1).spec
    described = translate.spec_to_bytes(spec)
    read, packed = [], []
    from_bytes, to_pb = translate.spec_from_bytes, translate.decision_to_pb
    monkeypatch.setattr(translate, "spec_from_bytes", lambda content: read.append(1) or from_bytes(content))
    monkeypatch.setattr(translate, "decision_to_pb", lambda decision: packed.append(decision.step) or to_pb(decision))

    async def train(address: str) -> None:
        ranks = [FakeRank(rank, address, spec, 1) for rank in range(RANKS)]
        await asyncio.gather(*(rank.attach(described, spec.layout.digest) for rank in ranks))
        assert sum(rank.sent for rank in ranks) < len(described) + RANKS * 512
        await ranks[0].load()
        for step in range(2):
            await asyncio.gather(*(rank.published(step) for rank in ranks))
            await asyncio.gather(*(rank.push(step) for rank in ranks))
            await asyncio.gather(*(rank.ask("Finish", rank.finish(step, 1)) for rank in ranks))
            await asyncio.gather(*(rank.ask("Commit", rank.commit(step)) for rank in ranks))
            await asyncio.gather(*(rank.ask("Mean", rank.mean(step + 1)) for rank in ranks))
        await asyncio.gather(*(rank.published(2) for rank in ranks))
        await asyncio.gather(*(rank.close() for rank in ranks))

    models = HostedModels(0, 1)
    with serve_models(models, token=TOKEN) as server:
        server.connect_peers([server.address])
        shared_loop().run(train(server.address), WAIT)
    models.close()
    assert (len(read), packed) == (1, [0, 1])

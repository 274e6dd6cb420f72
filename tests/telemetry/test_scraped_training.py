"""A training that is scraped all the time, and by clients that hang, has the weights of one that nobody looks at."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rayzero
from rayzero.cluster.processes.process_exporter import ProcessExporter
from rayzero.engine.context import RankContext, running_in
from rayzero.telemetry import http
from rayzero.telemetry.recorder import MemoryRecorder

from .exposed import rank_settings

pytestmark = pytest.mark.thorough

SCRAPES = 1000


def train(recorder: MemoryRecorder, goes_on: Callable[[int], bool]) -> tuple[int, dict[str, Tensor]]:
    """How many steps there were, and the weights."""
    torch.manual_seed(0)
    with running_in(RankContext(recorder=recorder)):
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
        model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        step = 0
        while goes_on(step):
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        return step, rayzero.full_state_dict(model)


class Scraper:
    """Asks as fast as it is answered, on one connection, in a thread of its own."""

    def __init__(self, address: str, paths: tuple[str, ...]) -> None:
        self.answers = 0
        self.error: BaseException | None = None
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._requests = [f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() for path in paths]
        self.thread = threading.Thread(target=self._run)

    def goes_on(self, step: int) -> bool:
        """Whether training should: it has made its first step when the asking begins."""
        if step == 1:
            self.thread.start()
        return step < 2 or self.thread.is_alive()

    def _run(self) -> None:
        try:
            with self._socket, self._socket.makefile("rb") as answers:
                while self.answers < SCRAPES:
                    self._socket.sendall(self._requests[self.answers % len(self._requests)])
                    assert answers.readline() == b"HTTP/1.1 200 OK\r\n"
                    size = 0
                    while (line := answers.readline()) != b"\r\n":
                        size = int(line.split()[1]) if line.startswith(b"Content-Length") else size
                    assert len(answers.read(size)) == size > 0
                    self.answers += 1
        except BaseException as error:  # the test raises it
            self.error = error


@pytest.mark.thorough
def test_a_thousand_scrapes_while_training_give_no_error_and_equal_weights(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http, "REFRESH_S", 0.0)  # every page is made anew
    recorder = MemoryRecorder()
    exporter = ProcessExporter(rank_settings(Path("/dev/shm")), recorder)
    host, _, port = exporter.target.address.rpartition(":")
    hanging = [socket.create_connection((host, int(port))) for _ in range(8)]
    try:
        for connection in hanging:
            connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n" * 50)  # answers that nobody reads
        scraper = Scraper(exporter.target.address, ("/metrics",) * 9 + ("/trace",))
        steps, scraped = train(recorder, scraper.goes_on)
        scraper.thread.join()
    finally:
        for connection in hanging:
            connection.close()
        exporter.close()
    assert scraper.error is None
    assert scraper.answers == SCRAPES
    assert "cannot make" not in caplog.text
    assert steps > 1
    _, alone = train(MemoryRecorder(), lambda step: step < steps)
    assert scraped.keys() == alone.keys()
    assert all(torch.equal(scraped[name], alone[name]) for name in alone)

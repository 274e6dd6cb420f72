"""Scraping: what exporters serve arrives by name and label; one that is gone, mute or drips holds nobody up."""

from __future__ import annotations

import json
import socket
import time
from contextlib import closing

import pytest

from rayzero.cluster.processes.process_exporter import Exporter
from rayzero.telemetry import names
from rayzero.telemetry.metric import Role
from rayzero.telemetry.recorder import MemoryRecorder
from rayzero.telemetry.scrape import Target, parse_series, read_discovery, scrape

from .strange_servers import HOST, drip, nobody, served_by


def target(address: str, index: int = 0) -> Target:
    return Target(address=address, run="demo", role=Role.RANK, node=HOST, index=index)


def test_what_an_exporter_serves_is_found_by_metric_and_labels() -> None:
    recorder = MemoryRecorder()
    exporter = Exporter(recorder, Role.RANK, host=HOST)
    recorder.set(names.STEP, 7)
    recorder.add(names.EXPOSED_WAIT_SECONDS, 1.5, cause="fetch")
    recorder.add(names.EXPOSED_WAIT_SECONDS, 0.5, cause="norm")
    recorder.observe(names.STEP_SECONDS, 0.25)
    try:
        (one,) = scrape([target(exporter.address)], timeout_s=20).processes
    finally:
        exporter.close()
    assert one.error is None
    assert one.series.get(names.STEP) == 7
    assert one.series.get(names.EXPOSED_WAIT_SECONDS) == 2.0
    assert one.series.get(names.EXPOSED_WAIT_SECONDS, cause="fetch") == 1.5
    assert one.series.get(names.EXPOSED_WAIT_SECONDS, cause="push") is None
    assert one.series.by_label(names.EXPOSED_WAIT_SECONDS, "cause") == {"fetch": 1.5, "norm": 0.5}
    assert (one.series.get(names.STEP_SECONDS, "_sum"), one.series.get(names.STEP_SECONDS, "_count")) == (0.25, 1)
    assert one.series.get(names.STEP_SECONDS) is None


def test_one_that_is_mute_holds_nobody_up_and_each_says_what_is_wrong() -> None:
    """The second takes the connection and says nothing for as long as it is open; the third drips for ever."""

    def wrong(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(b"HTTP/1.1 404 Not Found\r\n\r\n")

    def nonsense(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n<html>")

    with (
        closing(Exporter(MemoryRecorder(), Role.RANK, host=HOST)) as exporter,
        nobody() as gone,
        served_by(lambda connection: connection.recv(1000) and connection.recv(1)) as mute,
        served_by(drip) as dripping,
        served_by(wrong) as other,
        served_by(nonsense) as page,
    ):
        addresses = [exporter.address, gone, mute, dripping, other, page]
        began = time.monotonic()
        found = scrape(map(target, addresses), timeout_s=4).processes
        assert time.monotonic() - began < 60
    assert found[0].series is not None
    assert [one.series for one in found[1:]] == [None] * 5
    assert [one.error for one in found[:4]] == [
        None, "Connection refused", "no answer within 4 s", "no answer within 4 s",
    ]  # fmt: skip
    assert "answered '404 Not Found'" in found[4].error
    assert "no page of metrics" in found[5].error


@pytest.mark.parametrize(
    "text",
    [
        "what",
        "7",
        "[7]",
        json.dumps([{"targets": ["a:1"]}]),
        json.dumps([{"targets": ["a:1"], "labels": {"role": "rank", "run": "r", "node": "n"}}]),
        json.dumps([{"targets": ["a:1"], "labels": {"role": "cook", "run": "r", "node": "n"}}]),
    ],
)
def test_what_is_no_discovery_is_a_value_error(text) -> None:
    with pytest.raises(ValueError, match="this is not service discovery"):
        read_discovery(text.encode())


def test_a_page_that_is_cut_short_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="no page of metrics"):
        parse_series('rayzero_step{run="a')

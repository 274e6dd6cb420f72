"""The training loop as bytes: refused early, run with or without its config."""

from __future__ import annotations

import pickle
import threading

import pytest

from rayzero.cluster.processes.rank_worker import PackedLoop, pack_loop, unpack_loop
from rayzero.errors import ConfigError


def test_a_loop_gets_its_config_if_it_takes_one():
    assert unpack_loop(pack_loop(lambda config: config["x"] + 1, {"x": 1}))() == 2
    assert unpack_loop(pack_loop(lambda: "no config", {"x": 1}))() == "no config"
    assert unpack_loop(pack_loop(lambda config=None: config, 5))() == 5


def test_a_loop_that_takes_two_arguments_is_refused():
    with pytest.raises(ConfigError, match="it takes model, data"):
        pack_loop(lambda model, data: None, None)


def test_what_is_no_function_is_refused():
    with pytest.raises(ConfigError, match="train_loop must be a function, got str"):
        pack_loop("train", None)  # type: ignore[arg-type]


def test_a_config_that_cannot_be_sent_is_refused():
    with pytest.raises(ConfigError, match="cannot be sent to other processes"):
        pack_loop(lambda config: None, threading.Lock())


def test_a_loop_whose_module_is_not_there_says_what_to_do():
    packed = PackedLoop(code=pickle.dumps((len, None)).replace(b"builtins", b"nowhere_"), paths=())
    with pytest.raises(ConfigError, match="a rank worker cannot load train_loop"):
        unpack_loop(packed)

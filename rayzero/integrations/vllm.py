"""vLLM's weight transfer from a run of RayZero: every worker of the engine follows the run.

``weight_transfer_config={"backend": "rayzero"}`` makes it, because vLLM finds ``register`` as a plugin. The engine of
another backend waits for a trainer to send; this one reads what the run publishes anyway, so the trainer calls nothing,
and training waits for no engine.

[Note: packed copies] On CPUs, vLLM multiplies with packed copies of weights. Its reload of a model makes them anew for
each layer that weights come for, but for two (findings/vllm_cpu_reload_leaves_weights_behind.sh). A head that is tied
to the embedding is a layer of its own, and no weights come for it. Experts are packed where their kernel is made, and
a method that has a kernel only copies: into the packed memory, as they come. So here the head is packed again, and
experts have no kernel during an update."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

import rayzero
from rayzero.errors import ConfigError, UnsupportedError
from rayzero.followers.follower import WAIT_S, Follower

BACKEND = "rayzero"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What ``init_weight_transfer_engine`` takes: the arguments of ``rayzero.follow``. config: None: that of the folder
    that vLLM was started with."""

    run: str
    model: int = 0
    config: str | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What ``update_weights`` takes. version: which one; None: the newest. timeout_s: how long it may take to come."""

    version: int | None = None
    timeout_s: float = WAIT_S


class RayZeroEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads a version of a run's weights into a worker's model, in place."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._follower: Follower | None = None  # freed by: shutdown()
        self._kernels: dict[UnquantizedFusedMoEMethod, Any] = {}  # that experts had before the update

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Follow a run. Raises UnsupportedError for quantized experts on a CPU, else as ``rayzero.follow``."""
        for layer in self._experts():
            if not isinstance(layer.quant_method, UnquantizedFusedMoEMethod):
                raise UnsupportedError(
                    f"experts on a CPU are updated only unquantized, and vLLM has {type(layer.quant_method).__name__} "
                    "for them: start it without quantization, or run it on a GPU"
                )  # [Note: packed copies]
        self.shutdown()
        own = Path(self.model_config.model, "config.json")
        config = init_info.config or (own if own.is_file() else None)  # of another run's model, it is refused
        self._follower = rayzero.follow(init_info.run, model=init_info.model, config=config)

    def start_weight_update(self) -> None:
        """Nothing: the model keeps what it has until a version is there."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load a version. Raises ConfigError before ``init_weight_transfer_engine``, or if several workers are to load
        the newest: each might find another one; else as ``Follower.read``."""
        if self._follower is None:
            raise ConfigError("no run is followed: call init_weight_transfer_engine with {'run': its folder or name}")
        workers = self.parallel_config.world_size_across_dp
        if update_info.version is None and workers > 1:
            raise ConfigError(
                f"version is None, which is the newest, but each of {workers} workers may find another one: pass "
                "{'version': v}"
            )
        reading = self._follower.read(update_info.version, timeout_s=update_info.timeout_s)
        for layer in self._experts():
            method = layer.quant_method
            if method.moe_kernel is not None:  # None: the update has not come so far before
                self._kernels[method], method.moe_kernel = method.moe_kernel, None
        initialize_layerwise_reload(self.model)  # each time: a layer takes what comes once
        self.model.load_weights(reading)

    def finish_weight_update(self) -> None:
        """Put what has come into the places that the model runs with."""
        finalize_layerwise_reload(self.model, self.model_config)
        for method, kernel in self._kernels.items():
            method.moe_kernel = method.moe_kernel or kernel  # no weights came for it
        self._kernels.clear()
        for layer in self.model.modules():
            if isinstance(layer, ParallelLMHead) and isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
                layer.quant_method.process_weights_after_loading(layer)  # [Note: packed copies]

    def _experts(self) -> list[RoutedExperts]:
        """Layers whose method packs weights where it makes its kernel. [Note: packed copies]"""
        return [
            layer for layer in self.model.modules() if self.device.type == "cpu" and isinstance(layer, RoutedExperts)
        ]

    def shutdown(self) -> None:
        """Follow the run no more. Idempotent."""
        if self._follower is not None:
            self._follower.close()
            self._follower = None


def register() -> None:
    """Called by vLLM in each of its processes. Idempotent."""
    known: dict[str, Any] = WeightTransferEngineFactory._registry
    if BACKEND not in known:
        WeightTransferEngineFactory.register_engine(BACKEND, RayZeroEngine)

"""Several ranks, for packages that gather numbers: small values of all travel as means through the lead, without
collectives. Packages that keep one state per process get one rank per process: two would silently share it."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from rayzero.engine.context import RankContext, get_context, mean_over_ranks
from rayzero.errors import UnsupportedError
from rayzero.protocol.messages import MEAN_BYTES
from rayzero.quantities import count

_A_CALL = MEAN_BYTES // 8  # numbers in one mean
MOST_VALUES = 16 * _A_CALL  # of all ranks together: a call waits for the slowest rank, so more take too long

_claimed: dict[str, RankContext] = {}  # package -> the rank that its state in this process belongs to
_claiming = threading.Lock()


def values_of_ranks(tensor: Tensor) -> Tensor:
    """The tensors of all ranks, on every rank: [world size, *tensor.shape], its dtype and device, without a gradient.

    Every rank calls it after ``rayzero.prepare`` with a tensor of the same shape, and waits for the others. A rank's
    values come through exactly. Raises UnsupportedError for complex numbers, for integers beyond 2**53 and if there
    are more than MOST_VALUES numbers; also the errors of ``mean_over_ranks``."""
    context = get_context()
    world, rank = context.world_size, context.rank
    size = world * tensor.numel()
    if size > MOST_VALUES:
        raise UnsupportedError(
            f"tensors of shape {list(tensor.shape)} of {count(world, 'rank')} have {count(size, 'number')}; without a "
            f"torch.distributed group, ranks exchange at most {MOST_VALUES:,}: exchange their mean, or make a group"
        )
    exact = _exact(tensor)
    whole = 1 << (world - 1).bit_length()
    weight = (2 if rank < whole - world else 1) / whole  # powers of two that add up to 1: products are exact
    given = torch.zeros((world, *tensor.shape), dtype=torch.float64, device="cpu")
    given[rank] = exact / weight
    if size <= _A_CALL:  # in their shape, so that ranks with other shapes are noticed
        found = mean_over_ranks(given, weight=weight)
    else:
        parts = [mean_over_ranks(part, weight=weight) for part in torch.split(given.flatten(), _A_CALL)]
        found = torch.cat(parts).view(given.shape)
    return found.to(device=tensor.device, dtype=tensor.dtype)


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """The sum of all ranks' tensors, in their shape and dtype, on every rank. For large worlds cheaper than
    ``values_of_ranks``, and otherwise like it; sums of integers are exact up to 2**51."""
    world = get_context().world_size
    total = mean_over_ranks(_exact(tensor)) * world
    total = total if tensor.is_floating_point() else total.round()
    return total.to(device=tensor.device, dtype=tensor.dtype)


def _exact(tensor: Tensor) -> Tensor:
    """The same numbers as fp64 on the CPU."""
    exact = tensor.detach().cpu()
    if exact.is_complex() or (exact.dtype == torch.int64 and exact.numel() and int(exact.abs().max()) > 2**53):
        raise UnsupportedError(
            f"{exact.dtype} tensors with such values cannot be exchanged between ranks without a torch.distributed "
            "group: fp64 must hold each number"
        )
    return exact.double()


def claim_process(context: RankContext, package: str) -> None:
    """Reserve ``package``'s state in this process for this rank until its context closes. The rank may claim it again.

    The only rank of a run claims nothing. Raises UnsupportedError if another rank has claimed it."""
    if context.world_size == 1:
        return
    with _claiming:
        holder = _claimed.get(package)
        if holder is context:
            return
        if holder is not None:
            raise UnsupportedError(
                f"rank {holder.rank} uses {package} in this process already, and {package} keeps one state per "
                "process; run ranks as processes, with run_ranks(..., processes=True) or ZeroTrainer"
            )
        _claimed[package] = context
        context.on_close(lambda _: _claimed.__delitem__(package))

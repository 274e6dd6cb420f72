"""By how much a decoded value may differ, as each codec's docstring states it."""

from __future__ import annotations

import torch
from torch import Tensor

from rayzero.codecs.blocks import BLOCK

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
GROUP = {"int8": BLOCK, "quantization": BLOCK // 8}  # values that share a scale
SLACK = 1 + 2.0**-18  # for the roundings of scales in fp32


def stated_error(codec, values: Tensor) -> Tensor:
    """For each of ``values``: fp64. Infinite where it may come back as inf, nan where it comes back as nan."""
    if codec.name in HALVES:
        found, size = torch.finfo(HALVES[codec.name]), values.double().abs()
        twice = 1 + 2.0**-12 if values.dtype == torch.float64 else 1.0  # rounded twice
        bound = (size * (found.eps / 2)).clamp_min(found.tiny * found.eps / 2) * twice
        return bound.where(size < found.max * (1 + found.eps / 4), torch.inf).where(size.isfinite(), 0.0)
    if codec.name not in GROUP:
        return torch.zeros_like(values, dtype=torch.float64)
    padded = torch.constant_pad_nd(values.double(), (0, -values.numel() % BLOCK))
    groups = padded.view(-1, BLOCK // GROUP[codec.name], GROUP[codec.name])
    largest = groups.abs().amax(dim=2, keepdim=True)
    most = largest.amax(dim=1, keepdim=True)
    step = most / 254 * SLACK + 2.0**-142 if codec.name == "int8" else (largest + most / 255) / 14 * SLACK + 2.0**-137
    bound = step.where(most.isfinite(), torch.nan).expand_as(groups).reshape(-1)[: values.numel()]
    found = torch.finfo(values.dtype)
    return bound + ((values.double().abs() + bound) * (found.eps / 2)).clamp_min(found.tiny * found.eps / 2)

"""How tensors are stored in fewer bytes: one codec for each ``CpuCompressionMethod``."""

from __future__ import annotations

import torch

from rayzero.codecs.blocks import FourBits, Int8
from rayzero.codecs.codec import RAW, Codec, Halves, Lossless, Raw
from rayzero.config.choices import CpuCompressionMethod

__all__ = ["CODECS", "RAW", "Codec", "Raw", "codec_for"]

CODECS: dict[CpuCompressionMethod, Codec] = {
    CpuCompressionMethod.NONE: RAW,
    CpuCompressionMethod.FP16: Halves("fp16", torch.float16),
    CpuCompressionMethod.BF16: Halves("bf16", torch.bfloat16),
    CpuCompressionMethod.INT8: Int8(),
    CpuCompressionMethod.QUANTIZATION: FourBits(),
    CpuCompressionMethod.LOSSLESS: Lossless(),
}


def codec_for(method: CpuCompressionMethod | str, dtype: torch.dtype) -> Codec:
    """The codec of a method, or ``RAW`` where it does not take values of ``dtype``."""
    codec = CODECS[CpuCompressionMethod(method)]
    return codec if codec.takes(dtype) else RAW

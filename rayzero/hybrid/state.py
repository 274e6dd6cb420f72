"""Joins the optimizer states of a parameter's pieces into torch's format, and cuts such a state into pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rayzero.hybrid.split import Piece
from rayzero.kernels.optimizer_class import State


def join(parts: Sequence[tuple[Piece, State]], shape: Sequence[int], device: torch.device) -> State:
    """A parameter's state. ``parts``: its pieces in ascending order. A single whole piece gives its live tensors; of
    several pieces, tensors with one value per element are joined into new ones of ``shape`` on ``device``."""
    if len(parts) == 1 and parts[0][0].whole:
        return dict(parts[0][1])
    first = next((state for _, state in parts if state), {})
    return {key: _joined(key, parts, shape, device) for key in first}


def _joined(key: str, parts: Sequence[tuple[Piece, State]], shape: Sequence[int], device: torch.device) -> Any:
    values = [state[key] for _, state in parts]
    if not all(_per_element(value, piece) for value, (piece, _) in zip(values, parts, strict=True)):
        return values[0]
    return torch.cat([value.to(device) for value in values]).view(*shape)


def _per_element(value: Any, piece: Piece) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1 and value.numel() == piece.numel


def cut(state: State, piece: Piece, shape: Sequence[int]) -> State:
    """One piece's state, taken from the whole parameter's: slices of tensors that have ``shape``, other entries
    unchanged."""
    if piece.whole:
        return dict(state)
    return {
        key: value.reshape(-1)[piece.start : piece.stop]
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape == torch.Size(shape)
        else value
        for key, value in state.items()
    }

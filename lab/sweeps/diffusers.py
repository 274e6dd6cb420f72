"""diffusers' networks with small configs: what image and video models are made of."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from .beside import project, trained_beside_plain
from .trial import Case, Outcome

TITLE = "diffusers' networks"
INTRO = """
A small network of each kind trains three steps on noise: with plain PyTorch (AdamW, fused, fp32), and with RayZero in
the same process and with the smallest budget that it takes, so that units come and go. *same*: weights and losses are
equal bit for bit.
"""
PACKAGES = ["diffusers", "torch"]

Made = Callable[[torch.Generator], Tensor]


def noise(*shape: int) -> Made:
    """Normal numbers."""
    return lambda generator: torch.randn(shape, generator=generator)


def times(*shape: int) -> Made:
    """Numbers of steps."""
    return lambda generator: torch.randint(0, 1000, shape, generator=generator)


def shares(*shape: int) -> Made:
    """Numbers from 0 to 1."""
    return lambda generator: torch.rand(shape, generator=generator)


def labels(*shape: int) -> Made:
    """Classes."""
    return lambda generator: torch.randint(0, 8, shape, generator=generator)


def ones(*shape: int) -> Made:
    """A mask that hides nothing."""
    return lambda generator: torch.ones(shape)


_BLOCKS: dict[str, Any] = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
_VAE: dict[str, Any] = _BLOCKS | {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "latent_channels": 4,
}
_HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 3}
_IMAGE, _LATENT, _VIDEO = noise(2, 3, 16, 16), noise(2, 4, 16, 16), noise(2, 4, 2, 8, 8)

# class: its config, its inputs
_NETWORKS: dict[str, tuple[dict[str, Any], dict[str, Made]]] = {
    "UNet2DModel": (
        _BLOCKS
        | {
            "sample_size": 16,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": 8,
        },
        {"sample": _IMAGE, "timestep": times(2)},
    ),
    "UNet2DConditionModel": (
        _BLOCKS
        | {
            "sample_size": 16,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "cross_attention_dim": 32,
            "attention_head_dim": 4,
        },
        {"sample": _LATENT, "timestep": times(2), "encoder_hidden_states": noise(2, 7, 32)},
    ),
    "UNet3DConditionModel": (
        _BLOCKS
        | {
            "sample_size": 8,
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
            "cross_attention_dim": 32,
            "attention_head_dim": 4,
        },
        {"sample": noise(2, 4, 2, 8, 8), "timestep": times(2), "encoder_hidden_states": noise(2, 7, 32)},
    ),
    "UNetMotionModel": (
        _BLOCKS
        | {
            "sample_size": 8,
            "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
            "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"),
            "cross_attention_dim": 32,
            "num_attention_heads": 2,
            "motion_num_attention_heads": 2,
        },
        {"sample": noise(2, 4, 2, 8, 8), "timestep": times(2), "encoder_hidden_states": noise(2, 7, 32)},
    ),
    "UNet1DModel": (
        {
            "block_out_channels": (16, 32, 32),
            "extra_in_channels": 16,
            "in_channels": 2,
            "out_channels": 2,
            "sample_size": 32,
        },
        {"sample": noise(2, 2, 64), "timestep": times(2)},
    ),
    "ControlNetModel": (
        _BLOCKS
        | {
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "cross_attention_dim": 32,
            "attention_head_dim": 4,
            "conditioning_embedding_out_channels": (8, 16),
        },
        {
            "sample": noise(2, 4, 8, 8),
            "timestep": times(2),
            "encoder_hidden_states": noise(2, 7, 32),
            "controlnet_cond": noise(2, 3, 16, 16),
        },
    ),
    "UVit2DModel": (
        {
            "hidden_size": 32,
            "cond_embed_dim": 32,
            "encoder_hidden_size": 32,
            "micro_cond_encode_dim": 8,
            "micro_cond_embed_dim": 40,
            "block_out_channels": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "vocab_size": 64,
            "codebook_size": 60,
            "in_channels": 32,
            "block_num_heads": 2,
        },
        {
            "input_ids": labels(2, 4, 4),
            "encoder_hidden_states": noise(2, 7, 32),
            "pooled_text_emb": noise(2, 32),
            "micro_conds": noise(2, 5),
        },
    ),
    "AutoencoderKL": (_VAE, {"sample": _IMAGE}),
    "AsymmetricAutoencoderKL": (
        {
            "down_block_types": ("DownEncoderBlock2D",),
            "down_block_out_channels": (16,),
            "layers_per_down_block": 1,
            "up_block_types": ("UpDecoderBlock2D",),
            "up_block_out_channels": (16,),
            "layers_per_up_block": 1,
            "latent_channels": 4,
            "norm_num_groups": 8,
        },
        {"sample": _IMAGE},
    ),
    "VQModel": (_VAE | {"latent_channels": 3, "num_vq_embeddings": 16}, {"sample": _IMAGE}),
    "AutoencoderTiny": (
        {
            "encoder_block_out_channels": (16, 16),
            "decoder_block_out_channels": (16, 16),
            "num_encoder_blocks": (1, 1),
            "num_decoder_blocks": (1, 1),
        },
        {"sample": _IMAGE},
    ),
    "AutoencoderKLTemporalDecoder": (
        {
            "block_out_channels": (32, 32),
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "layers_per_block": 1,
            "latent_channels": 4,
        },
        {"sample": noise(2, 3, 16, 16), "num_frames": lambda _: 2},
    ),
    "AutoencoderKLCogVideoX": (
        {
            "block_out_channels": (8, 8, 8, 8),
            "down_block_types": ("CogVideoXDownBlock3D",) * 4,
            "up_block_types": ("CogVideoXUpBlock3D",) * 4,
            "layers_per_block": 1,
            "latent_channels": 4,
            "norm_num_groups": 2,
        },
        {"sample": noise(1, 3, 5, 16, 16)},
    ),
    "AutoencoderKLWan": (
        {
            "base_dim": 8,
            "z_dim": 4,
            "dim_mult": [1, 1, 1, 1],
            "num_res_blocks": 1,
            "temperal_downsample": [False, True, True],
        },
        {"sample": noise(1, 3, 5, 16, 16)},
    ),
    "DiTTransformer2DModel": (
        _HEADS | {"in_channels": 4, "out_channels": 4, "sample_size": 8, "patch_size": 2, "norm_num_groups": 4},
        {"hidden_states": noise(2, 4, 8, 8), "timestep": times(2), "class_labels": labels(2)},
    ),
    "PixArtTransformer2DModel": (
        _HEADS
        | {
            "sample_size": 8,
            "patch_size": 2,
            "caption_channels": 32,
            "cross_attention_dim": 32,
            "use_additional_conditions": False,
            "in_channels": 4,
            "out_channels": 8,
        },
        {
            "hidden_states": noise(2, 4, 8, 8),
            "timestep": times(2),
            "encoder_hidden_states": noise(2, 7, 32),
            "added_cond_kwargs": lambda _: {"aspect_ratio": None, "resolution": None},
        },
    ),
    "Transformer2DModel": (
        _HEADS | {"in_channels": 32, "norm_num_groups": 8, "cross_attention_dim": 32},
        {"hidden_states": noise(2, 32, 4, 4), "encoder_hidden_states": noise(2, 7, 32)},
    ),
    "PriorTransformer": (
        _HEADS | {"embedding_dim": 32, "num_embeddings": 7, "additional_embeddings": 4},
        {
            "hidden_states": noise(2, 32),
            "timestep": times(2),
            "proj_embedding": noise(2, 32),
            "encoder_hidden_states": noise(2, 7, 32),
            "attention_mask": ones(2, 7),
        },
    ),
    "SD3Transformer2DModel": (
        _HEADS
        | {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "joint_attention_dim": 32,
            "caption_projection_dim": 32,
            "pooled_projection_dim": 32,
            "pos_embed_max_size": 8,
        },
        {
            "hidden_states": noise(2, 4, 8, 8),
            "encoder_hidden_states": noise(2, 7, 32),
            "pooled_projections": noise(2, 32),
            "timestep": times(2),
        },
    ),
    "FluxTransformer2DModel": (
        {
            "patch_size": 1,
            "in_channels": 4,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "axes_dims_rope": (4, 4, 8),
        },
        {
            "hidden_states": noise(2, 16, 4),
            "encoder_hidden_states": noise(2, 7, 32),
            "pooled_projections": noise(2, 32),
            "timestep": shares(2),
            "img_ids": noise(16, 3),
            "txt_ids": noise(7, 3),
        },
    ),
    "ChromaTransformer2DModel": (
        {
            "patch_size": 1,
            "in_channels": 4,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "axes_dims_rope": (4, 4, 8),
            "approximator_num_channels": 8,
            "approximator_hidden_dim": 16,
            "approximator_layers": 1,
        },
        {
            "hidden_states": noise(2, 16, 4),
            "encoder_hidden_states": noise(2, 7, 32),
            "timestep": shares(2),
            "img_ids": noise(16, 3),
            "txt_ids": noise(7, 3),
        },
    ),
    "QwenImageTransformer2DModel": (
        {
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 3,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "axes_dims_rope": (4, 4, 8),
        },
        {
            "hidden_states": noise(2, 16, 16),
            "encoder_hidden_states": noise(2, 7, 32),
            "encoder_hidden_states_mask": ones(2, 7),
            "timestep": shares(2),
            "img_shapes": lambda _: [[(1, 4, 4)]] * 2,
            "txt_seq_lens": lambda _: [7, 7],
        },
    ),
    "AuraFlowTransformer2DModel": (
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "num_mmdit_layers": 2,
            "num_single_dit_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "caption_projection_dim": 32,
            "out_channels": 4,
            "pos_embed_max_size": 64,
        },
        {"hidden_states": noise(2, 4, 8, 8), "encoder_hidden_states": noise(2, 7, 32), "timestep": shares(2)},
    ),
    "SanaTransformer2DModel": (
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 3,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 16,
            "cross_attention_dim": 32,
            "caption_channels": 32,
            "sample_size": 8,
        },
        {"hidden_states": noise(2, 4, 8, 8), "encoder_hidden_states": noise(2, 7, 32), "timestep": times(2)},
    ),
    "LTXVideoTransformer3DModel": (
        _HEADS | {"in_channels": 4, "out_channels": 4, "cross_attention_dim": 32, "caption_channels": 32},
        {
            "hidden_states": noise(2, 16, 4),
            "encoder_hidden_states": noise(2, 7, 32),
            "timestep": shares(2),
            "encoder_attention_mask": ones(2, 7),
            "num_frames": lambda _: 1,
            "height": lambda _: 4,
            "width": lambda _: 4,
        },
    ),
    "WanTransformer3DModel": (
        {
            "patch_size": (1, 2, 2),
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 32,
            "freq_dim": 32,
            "ffn_dim": 64,
            "num_layers": 3,
        },
        {"hidden_states": _VIDEO, "timestep": times(2), "encoder_hidden_states": noise(2, 7, 32)},
    ),
    "CogVideoXTransformer3DModel": (
        _HEADS
        | {
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 16,
            "text_embed_dim": 32,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 5,
            "patch_size": 2,
            "max_text_seq_length": 7,
        },
        {"hidden_states": noise(2, 2, 4, 8, 8), "timestep": times(2), "encoder_hidden_states": noise(2, 7, 32)},
    ),
    "MochiTransformer3DModel": (
        _HEADS
        | {
            "in_channels": 4,
            "text_embed_dim": 32,
            "pooled_projection_dim": 32,
            "time_embed_dim": 16,
            "patch_size": 2,
            "max_sequence_length": 7,
        },
        {
            "hidden_states": _VIDEO,
            "encoder_hidden_states": noise(2, 7, 32),
            "timestep": times(2),
            "encoder_attention_mask": lambda _: torch.ones(2, 7, dtype=torch.bool),
        },
    ),
    "HunyuanVideoTransformer3DModel": (
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_layers": 1,
            "num_single_layers": 2,
            "num_refiner_layers": 1,
            "patch_size": 2,
            "patch_size_t": 1,
            "guidance_embeds": True,
            "text_embed_dim": 32,
            "pooled_projection_dim": 32,
            "rope_axes_dim": (4, 6, 6),
        },
        {
            "hidden_states": _VIDEO,
            "timestep": times(2),
            "encoder_hidden_states": noise(2, 7, 32),
            "encoder_attention_mask": ones(2, 7),
            "pooled_projections": noise(2, 32),
            "guidance": shares(2),
        },
    ),
    "Lumina2Transformer2DModel": (
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "hidden_size": 32,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "num_attention_heads": 2,
            "num_kv_heads": 1,
            "multiple_of": 2,
            "axes_dim_rope": (4, 6, 6),
            "axes_lens": (64, 64, 64),
            "cap_feat_dim": 32,
        },
        {
            "hidden_states": noise(2, 4, 8, 8),
            "timestep": shares(2),
            "encoder_hidden_states": noise(2, 7, 32),
            "encoder_attention_mask": lambda _: torch.ones(2, 7, dtype=torch.bool),
        },
    ),
}


def cases() -> Iterator[Case]:
    """A case for each network."""
    logging.disable(logging.WARNING)
    import_module("diffusers.models")  # here, not in each case's process
    for name, (config, inputs) in _NETWORKS.items():
        yield Case(name, partial(_case, name, config, inputs))


def _case(name: str, config: dict[str, Any], inputs: dict[str, Made]) -> Outcome:
    def build() -> nn.Module:
        made: nn.Module = getattr(import_module("diffusers"), name)(**config)
        return made

    def loss(model: nn.Module, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        return project(model(**{key: make(generator) for key, make in inputs.items()}), step)

    return trained_beside_plain(build, loss)

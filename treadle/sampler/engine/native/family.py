"""Which models the native decoder computes exactly, and their rotary tables.

Guarantees: a model is accepted only if every setting that changes its forward pass is one that
the decoder implements; anything unknown is refused with a reason, never approximated.

Takes: ModelShape and the library's config. Gives: a reason to refuse, or the tables.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from treadle.types import ModelShape

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "llama3")


def refusal(shape: ModelShape, config: Any) -> str | None:
    """Why the decoder does not compute this model; None when it does."""
    if shape.family not in FAMILIES:
        return f"family `{shape.family}` is not one of {', '.join(FAMILIES)}"
    if shape.heads % shape.kv_heads:
        return f"{shape.heads} heads are not a multiple of {shape.kv_heads} KV heads"
    for name in ("head_dim", "hidden", "intermediate"):
        if getattr(shape, name) % 32:
            return f"{name} {getattr(shape, name)} is not a multiple of 32"
    if config.hidden_act != "silu":
        return f"activation `{config.hidden_act}` is not silu"
    for name in ("attention_bias", "mlp_bias", "attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None):
            return f"{name} is set"
    rope = config.rope_parameters
    if rope.get("rope_type") not in ROPE_TYPES:
        return f"rope type `{rope.get('rope_type')}` is not one of {', '.join(ROPE_TYPES)}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return f"only {rope['partial_rotary_factor']} of each head is rotated"
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None)
    slides = layers is None or "sliding_attention" in layers
    if window is not None and slides and window < shape.max_context:
        return f"a sliding window of {window} is shorter than the context of {shape.max_context}"
    return None


def rotary_tables(shape: ModelShape, config: Any) -> tuple[Tensor, Tensor]:
    """cos and sin as the library's own rotary module gives them in bf16.

    Returns:
        two bf16 tensors [max_context, head_dim / 2]: the halves of its tables are equal.
    """
    # The accepted families share one definition; it reads the config's rope type and head size.
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(config)
    like = torch.empty(0, dtype=torch.bfloat16)
    cos, sin = rotary(like, torch.arange(shape.max_context)[None])
    half = shape.head_dim // 2
    return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()

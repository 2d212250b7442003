"""A decoder in C++ for Llama-like models in bf16 on CPUs with bf16 dot products.

Guarantees: it computes what the training forward computes in bf16 and rounds where that rounds,
so that sampled and trained logprobs differ by the order of additions alone, or it refuses the
model with a reason; `load` returning None means that the torch path must be used. It exists
because a decode step for 64 rows is bound by the stream of the weights through the memory bus:
operator by operator torch takes about 75 ms for a 135M model where this takes about 25.

    build.py     compile once, at first use         family.py   which models, rotary tables
    decoder.py   the Python side of a decoder       abi.py      structs of interface.h

    decoder.cpp  the phases of a step               team.h      threads and phases
    weights.h    packing and fusing                 gemm.h      products with AMX or AVX-512
    attention.h  one row over its KV blocks         layers.h    norm, rotary, activation
    sample.h     inverse CDF over fp32 logits       call.h      checks of a call
    simd.h       16 lanes of bf16                   memory.h    huge pages

Takes: weights, and the KV cache of the engine. Gives: NativeDecoder, or a reason.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from treadle.errors import ContractError
from treadle.sampler.engine.native import build, family
from treadle.sampler.engine.native.decoder import NativeDecoder
from treadle.types import ModelShape

__all__ = ["NativeDecoder", "available", "load", "refusal"]


def available() -> str | None:
    """None when the decoder can run on this machine, else the reason ("no C++ compiler (...)").

    The first call compiles it, about 8 s, unless an earlier process did.
    """
    library = build.library()
    return library if isinstance(library, str) else None


def refusal(shape: ModelShape, config: Any, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Why this machine and model take the torch path; None when the decoder serves them."""
    if dtype != torch.bfloat16:
        return f"the compute dtype is {dtype}, not torch.bfloat16"
    return family.refusal(shape, config) or available()


def load(
    shape: ModelShape,
    snapshot: Any,
    config: Any,
    k: Tensor,
    v: Tensor,
    *,
    threads: int | None = None,
    kernel: str = "best",
) -> NativeDecoder | None:
    """A decoder with the weights of `snapshot`, or None: see `refusal` for why.

    Args:
        snapshot: see `NativeDecoder.update`.
        config: the Hugging Face config of the model.
        k, v: the cache, bf16 [layers, num_blocks, kv_heads, 16, head_dim], contiguous; written in
            place. Keys are stored multiplied by head_dim ** -0.5, as the training forward
            multiplies and rounds them, so another decoder must not read them.
        threads: default torch.get_num_threads().
        kernel: "best", or "avx512_bf16" / "amx_bf16" to ask for one.

    Raises:
        ContractError: the cache does not fit the model.
        WeightsError: the snapshot does not.
    """
    if refusal(shape, config, k.dtype):
        return None
    library = build.library()
    assert not isinstance(library, str)
    expected = (shape.layers, k.shape[1], shape.kv_heads, 16, shape.head_dim)
    if any(t.shape != expected or t.dtype != k.dtype or not t.is_contiguous() for t in (k, v)):
        raise ContractError(
            f"native decoder: the cache should be contiguous {expected}, "
            f"is {tuple(k.shape)} and {tuple(v.shape)}"
        )
    decoder = NativeDecoder(
        library, shape, config, k, v, threads or torch.get_num_threads(), kernel
    )
    decoder.update(snapshot)
    return decoder

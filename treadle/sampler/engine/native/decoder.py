"""One decoder over one KV cache: token ids in, logits or draws out.

Guarantees: a row's result depends on its own ids, positions and blocks alone, bit for bit, whatever
the other rows, their number and the number of threads; weights change only between steps; an id,
position or block out of range raises before anything is written.

Takes: rows with positions and block tables. Gives: logits, or ids with logprob and entropy.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from treadle.errors import ContractError, SamplerError, WeightsError
from treadle.sampler.engine.native import abi, family
from treadle.types import ModelShape

SECTIONS = ("norm", "qkv", "attend", "o", "gate_up", "down", "head", "sample")
"""Parts of a step, in the order of the library's clock."""

_SHAPE = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")
_KERNELS = {"best": 0, "avx512_bf16": 1, "amx_bf16": 2}
_ERROR_BYTES = 400


class NativeDecoder:
    """Made by `load`. Not for concurrent use; each call releases the GIL and uses all threads."""

    def __init__(
        self,
        library: ctypes.CDLL,
        shape: ModelShape,
        config: Any,
        k: Tensor,
        v: Tensor,
        threads: int,
        kernel: str,
    ) -> None:
        self.shape = shape
        self._library = library
        abi.declare(library)
        self._cache = (k, v)  # the library holds their addresses
        cos, sin = family.rotary_tables(shape, config)
        spec = abi.Spec(
            **{name: getattr(shape, name) for name in _SHAPE},
            positions=shape.max_context,
            threads=threads,
            kernel=_KERNELS[kernel],
            eps=config.rms_norm_eps,
            scale=shape.head_dim**-0.5,
            kv_blocks=k.shape[1],
            k=k.data_ptr(),
            v=v.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
        )
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        self._handle = library.treadle_create(ctypes.byref(spec), error, _ERROR_BYTES)
        if not self._handle:
            raise SamplerError(f"native decoder: {error.value.decode()}")
        self._pid = os.getpid()
        weakref.finalize(self, _destroy, library, self._handle, self._pid)

    @property
    def kernel(self) -> str:
        """Which dot products run: "amx_bf16" or "avx512_bf16"."""
        return self._library.treadle_kernel(self._handle).decode()

    def sections(self) -> dict[str, float]:
        """Milliseconds of the last call by part, as thread 0 saw them."""
        seconds = self._library.treadle_sections(self._handle)
        return {name: 1e3 * seconds[i] for i, name in enumerate(SECTIONS)}

    def update(self, snapshot: Any) -> None:
        """Serve other weights from the next call on; nothing is allocated.

        Args:
            snapshot: the tensors by their Hugging Face names, or something whose `tensors` is
                such a mapping. All bf16 on the CPU. The embedding is kept by reference, all else
                is copied.

        Raises:
            WeightsError: a tensor is missing, unknown, or not of the expected shape or dtype;
                the old weights are then served on.
        """
        tensors: Mapping[str, Tensor] = getattr(snapshot, "tensors", snapshot)
        weights, kept = _weights(self.shape, tensors)
        self._check(self._library.treadle_pack, weights)
        self._embedding = kept

    def step(
        self,
        ids: Int[Tensor, " rows"],
        positions: Int[Tensor, " rows"],
        tables: Int[Tensor, "rows width"],
    ) -> Float[Tensor, "rows vocab"]:
        """Write K and V of one token per row and return its next-token logits.

        Args:
            ids: int64.
            positions: int32, position of each token in its sequence; K and V of all earlier
                positions are in the cache, or are rows of this call.
            tables: int32, `tables[r, p // 16]` is the block of position p of row r; entries past
                the row's position are not read.

        Returns:
            fp32, never rounded to bf16.

        Raises:
            SamplerError: an id, position or block is out of range; names the row.
        """
        logits = torch.empty(len(ids), self.shape.vocab)
        self._run(ids, positions, tables, num_outputs=len(ids), logits=_at(logits))
        return logits

    def prefill(
        self,
        ids: Int[Tensor, " tokens"],
        positions: Int[Tensor, " tokens"],
        tables: Int[Tensor, "tokens width"],
        outputs: Int[Tensor, " outputs"],
    ) -> Float[Tensor, "outputs vocab"]:
        """`step` for prompt tokens: all K and V are written before any row attends.

        Rows may be consecutive positions of one sequence, or of several, in any order: a row
        attends to positions up to its own.

        Args:
            outputs: int64, the rows whose logits are wanted, e.g. the last token of each prompt.
        """
        logits = torch.empty(len(outputs), self.shape.vocab)
        outputs = _as(outputs, torch.int64, (len(outputs),))
        self._run(
            ids,
            positions,
            tables,
            num_outputs=len(outputs),
            outputs=_at(outputs),
            logits=_at(logits),
        )
        return logits

    def step_sample(
        self,
        ids: Int[Tensor, " rows"],
        positions: Int[Tensor, " rows"],
        tables: Int[Tensor, "rows width"],
        temperature: Float[Tensor, " rows"],
        uniform: Float[Tensor, " rows"],
    ) -> tuple[Int[Tensor, " rows"], Float[Tensor, " rows"], Float[Tensor, " rows"]]:
        """`step` and one draw per row.

        Args:
            temperature: fp32; 0 = greedy: the lowest id among the largest logits, whose logprob
                and entropy are those at temperature 1.
            uniform: fp64 in [0, 1). The draw is the first id, in vocabulary order, whose
                cumulated probability exceeds it; an id of probability 0 is never drawn.

        Returns:
            ids int64; logprobs and entropies fp32 in nats at the row's temperature. Where a row's
            logits are not finite its logprob is NaN and its id means nothing.
        """
        rows = len(ids)
        temperature = _as(temperature, torch.float32, (rows,))
        uniform = _as(uniform, torch.float64, (rows,))
        drawn = torch.empty(rows, dtype=torch.int64)
        logprobs, entropies = torch.empty(rows), torch.empty(rows)
        self._run(
            ids,
            positions,
            tables,
            num_outputs=rows,
            temperature=_at(temperature),
            uniform=_at(uniform),
            next=_at(drawn),
            logprobs=_at(logprobs),
            entropies=_at(entropies),
        )
        return drawn, logprobs, entropies

    def _run(self, ids: Tensor, positions: Tensor, tables: Tensor, **rest: int) -> None:
        rows = len(ids)
        if rows == 0:
            return
        if not hasattr(self, "_embedding"):
            raise ContractError("native decoder: no weights yet", hint="call update first")
        ids = _as(ids, torch.int64, (rows,))
        positions = _as(positions, torch.int32, (rows,))
        tables = _as(tables, torch.int32, (rows, tables.shape[1]))
        self._check(
            self._library.treadle_run,
            abi.Call(
                rows=rows,
                table_width=tables.shape[1],
                ids=_at(ids),
                positions=_at(positions),
                tables=_at(tables),
                **rest,
            ),
        )

    def _check(self, function: Any, argument: ctypes.Structure) -> None:
        if os.getpid() != self._pid:
            raise SamplerError(
                "native decoder: this process was forked, its threads were not",
                hint="load a decoder in the process that uses it",
            )
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        if function(self._handle, ctypes.byref(argument), error, _ERROR_BYTES):
            raise SamplerError(f"native decoder: {error.value.decode()}")


def _destroy(library: ctypes.CDLL, handle: int, pid: int) -> None:
    # A forked child would wait for threads that it does not have.
    if os.getpid() == pid:
        library.treadle_destroy(handle)


def _as(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if tensor.dtype != dtype or tensor.shape != shape or tensor.device.type != "cpu":
        raise SamplerError(
            f"native decoder: expected {dtype} {shape} on the CPU, got {tensor.dtype} "
            f"{tuple(tensor.shape)} on {tensor.device}"
        )
    return tensor.contiguous()


def _at(tensor: Tensor) -> int:
    return tensor.data_ptr()


def _weights(shape: ModelShape, tensors: Mapping[str, Tensor]) -> tuple[abi.Weights, Tensor]:
    """Addresses of all tensors, each checked, and the embedding."""
    left = dict(tensors)

    def take(name: str, *size: int, optional: bool = False) -> int | None:
        tensor = left.pop(name, None)
        if tensor is None and optional:
            return None
        if tensor is None:
            raise WeightsError(f"native decoder: no tensor `{name}` among {len(tensors)}")
        if tensor.dtype != torch.bfloat16 or tensor.shape != size or not tensor.is_contiguous():
            raise WeightsError(
                f"native decoder: `{name}` should be contiguous bfloat16 {size}, is {tensor.dtype} "
                f"{tuple(tensor.shape)} with strides {tensor.stride()}"
            )
        return tensor.data_ptr()

    d, ff, head = shape.hidden, shape.intermediate, shape.head_dim
    q, kv = shape.heads * head, shape.kv_heads * head
    bias, head_norm = shape.family == "qwen2", shape.family == "qwen3"
    layers = (abi.Layer * shape.layers)()
    for i in range(shape.layers):
        at, attn, mlp = (f"model.layers.{i}.{x}" for x in ("", "self_attn.", "mlp."))
        layers[i] = abi.Layer(
            norm1=take(f"{at}input_layernorm.weight", d),
            q=take(f"{attn}q_proj.weight", q, d),
            k=take(f"{attn}k_proj.weight", kv, d),
            v=take(f"{attn}v_proj.weight", kv, d),
            q_bias=take(f"{attn}q_proj.bias", q) if bias else None,
            k_bias=take(f"{attn}k_proj.bias", kv) if bias else None,
            v_bias=take(f"{attn}v_proj.bias", kv) if bias else None,
            q_norm=take(f"{attn}q_norm.weight", head) if head_norm else None,
            k_norm=take(f"{attn}k_norm.weight", head) if head_norm else None,
            o=take(f"{attn}o_proj.weight", d, q),
            norm2=take(f"{at}post_attention_layernorm.weight", d),
            gate=take(f"{mlp}gate_proj.weight", ff, d),
            up=take(f"{mlp}up_proj.weight", ff, d),
            down=take(f"{mlp}down_proj.weight", d, ff),
        )
    embedding = tensors.get("model.embed_tokens.weight")
    weights = abi.Weights(
        embedding=take("model.embed_tokens.weight", shape.vocab, d),
        norm=take("model.norm.weight", d),
        layers=layers,
    )
    own = take("lm_head.weight", shape.vocab, d, optional=shape.tied)
    weights.head = weights.embedding if own is None else own
    if left:
        raise WeightsError(
            f"native decoder: {len(left)} tensors that it would ignore, first `{min(left)}`"
        )
    assert embedding is not None
    return weights, embedding

"""Peak memory of a run on one machine, in closed form, before anything is loaded.

Guarantees: bounded by what a user can set. Activations grow with `learn.micro_tokens` (shared
prompts counted once), the cache with the rows that the engine decodes; nothing else grows.
It is an estimate of a dense decoder with gated MLPs (llama, qwen, gemma): attention scores are
recomputed and logits made in chunks, so neither grows with the square of the context. Checked on
SmolLM2-135M, LoRA r 8, bfloat16, 2,688 packed tokens, trainer alone: 2.76 GiB without `heap`, 2.75
measured; a whole first run: 3.1 GiB here, 3.2 measured over 26 steps.

Takes: a ModelShape and settings. Gives: bytes by part.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from treadle.config import CriticConfig, LoraConfig
from treadle.machine.heap import SLACK_BYTES
from treadle.types import ModelShape

RUNTIME = 512 << 20
"""Interpreter, torch, transformers, tokenizer and thread stacks, resident after a first step."""

HEAD_ROWS = 256
"""Rows of logits that exist at a time."""

SCORES = 4 * (16 << 20)
"""Attention scores of one block, their softmax and both gradients, at their largest."""

_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    parts: dict[str, int] = field(default_factory=dict)
    """Bytes by part, all alive at the peak: `runtime`, `masters` (float32 weights), `compute`
    (merged weights that the trainer uses), `reference` (frozen weights of a KL term), `critic` (its
    weights, gradients, moments and kept hidden states), `versions` (older weights by which mismatch
    is measured), `engine` (the sampler's own copy),
    `optimizer` (adapters, gradients and moments), `kv_cache`, `activations`,
    `transient`, and `heap` (free memory that malloc keeps, see machine/heap.py)."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def estimate_memory(
    shape: ModelShape,
    *,
    lora: LoraConfig | None,
    dtype: str,
    micro_tokens: int,
    engine_kv_tokens: int,
    reference: bool = False,
    critic: CriticConfig | None = None,
    step_tokens: int = 0,
    versions: int = 0,
) -> MemoryEstimate:
    """Bytes at the peak: in a backward pass, or in a publication, whichever is larger.

    Args:
        lora: None = every parameter is trained.
        dtype: compute dtype, "float32" or "bfloat16"; masters are float32 always.
        micro_tokens: packed tokens of one forward and backward; a longer single row exceeds it.
        reference: a KL term needs the policy of the start: a copy of all weights in full
            fine-tuning, nothing with LoRA, whose base it is.
        critic: a model of its own needs compute copies, and masters in full fine-tuning; its
            passes are not those of the policy, so they share `activations`.
        step_tokens: trained tokens of a step, whose hidden states a critic's head keeps.
        versions: older weights that are kept: adapters in float32, or compute copies of all weights
            in full fine-tuning. Measuring by them takes what a publication takes.
        engine_kv_tokens: positions whose keys and values the engine holds at once, e.g. live rows
            times their length plus one prompt per group.

    Per packed token and layer, backward needs the inputs of both norms and of all linears, the
    rotated queries and keys, the values, and gate and up: 4 h + 2 H D + 2 K D + 3 I numbers, where
    h is hidden, H and K heads and key heads of D, I the MLP's width.
    """
    size = _BYTES[dtype]
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    in_linears = shape.layers * (
        2 * shape.hidden * (queries + keys) + 3 * shape.hidden * shape.intermediate
    )
    others = shape.parameters - in_linears
    # Without rounding and without training, a table that is no linear needs no copy.
    copied = in_linears if lora is not None and dtype == "float32" else shape.parameters
    token = 4 * shape.hidden + 2 * queries + 2 * keys + 3 * shape.intermediate
    saved = size * micro_tokens * (shape.layers * token + 3 * shape.hidden)
    working = size * micro_tokens * (3 * shape.intermediate + 4 * shape.hidden)
    logits = HEAD_ROWS * shape.vocab * (8 + 3 * size if dtype == "bfloat16" else 8)
    if lora is None:
        # float32 gradients and two moments; the head's gradient is summed in a table of its own.
        optimizer, logits = 12 * shape.parameters, logits + 4 * shape.vocab * shape.hidden
    else:
        optimizer = 16 * lora_parameters(shape, lora.rank)
    backward = saved + working + max(logits, SCORES)
    # A publication makes the next compute copy and the next engine copy beside the old ones.
    publication = size * (copied + in_linears)
    activations, transient = (
        (saved, backward - saved) if backward >= publication else (0, publication)
    )
    return MemoryEstimate(
        parts={
            "runtime": RUNTIME,
            "masters": 4 * shape.parameters,
            "compute": size * copied,
            "reference": size * shape.parameters if reference and lora is None else 0,
            "critic": _critic(shape, lora, critic, size, copied, step_tokens),
            "versions": versions
            * (size * shape.parameters if lora is None else 4 * lora_parameters(shape, lora.rank)),
            "engine": size * (in_linears + min(others, shape.vocab * shape.hidden)),
            "optimizer": optimizer,
            "kv_cache": 2 * shape.layers * keys * size * engine_kv_tokens,
            "activations": activations,
            "transient": transient,
            "heap": SLACK_BYTES,
        }
    )


def critic_parameters(shape: ModelShape, lora: LoraConfig | None, critic: CriticConfig) -> int:
    """What the critic's optimiser owns: its layer and, in a model of its own, what is trained."""
    trunk = 0
    if critic.kind == "model":
        trunk = shape.parameters if lora is None else lora_parameters(shape, lora.rank)
    return trunk + shape.hidden + 1


def _critic(
    shape: ModelShape,
    lora: LoraConfig | None,
    critic: CriticConfig | None,
    size: int,
    copied: int,
    step_tokens: int,
) -> int:
    if critic is None:
        return 0
    # float32 master, gradient and two moments of each parameter.
    state = 16 * critic_parameters(shape, lora, critic)
    if critic.kind == "model":
        return state + size * copied
    return state + (0 if critic.trunk_gradient else size * step_tokens * shape.hidden)


def lora_parameters(shape: ModelShape, rank: int) -> int:
    """Parameters of adapters on all linears of a dense decoder, the head excepted."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sides = 2 * (shape.hidden + queries) + 2 * (shape.hidden + keys)
    return shape.layers * rank * (sides + 3 * (shape.hidden + shape.intermediate))

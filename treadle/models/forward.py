"""One forward pass of a Hugging Face decoder with the weights and the attention of the caller.

The library's module is kept; `install` makes every parameter that its forward reads, and its
attention, come from the *current thread's* `Weights` and `Attend`. Guarantees:
- two threads run one module at the same time with different weights (trainer and engine);
- outside of `run` an installed module still holds its own parameters: `state_dict`, `parameters`
  and saving are untouched;
- an attention feature that `Attend` would ignore (soft cap, sinks, a window shorter than the
  context, a mask, dropout) raises ModelError, it is never dropped. (What no argument shows, e.g.
  layers that mix tokens outside of attention, is found by proof.py.)

Takes: a causal LM of transformers. Gives: last hidden states.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from treadle.errors import ModelError

IMPLEMENTATION = "treadle"
"""Name under which the attention is registered with transformers."""


class Attend(Protocol):
    """How queries meet keys in one forward; owns masks and, in the engine, the KV cache."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention of one layer.

        Args:
            layer: index of the decoder layer.
            q: queries [B, H, T, D], rotary already applied.
            k, v: keys and values [B, Hkv, T, D] of the same tokens.
            scale: what q . k is multiplied by before the softmax.

        Returns:
            [B, T, H, D].
        """
        ...


class Weights(Protocol):
    """What the parameters of the module are in one forward. Names are the module's own."""

    def linear(self, name: str, x: Tensor) -> Tensor:
        """x [..., in] through the nn.Linear called `name` ("model.layers.0.mlp.up_proj")."""
        ...

    def linears(self, names: tuple[str, ...], x: Tensor) -> tuple[Tensor, ...]:
        """Several nn.Linear of one input, so that they may be computed as one product."""
        ...

    def embedding(self, name: str, ids: Tensor) -> Tensor:
        """Rows [..., hidden] of the nn.Embedding called `name`."""
        ...

    def parameter(self, name: str) -> Tensor:
        """Any other parameter ("model.norm.weight"), in the compute dtype."""
        ...


@dataclass(slots=True)
class _Pass:
    """The forward that is running in this thread."""

    attend: Attend
    weights: Weights
    positions: Tensor
    window: int | None = None
    """Sliding window that the module asked for last, if it did."""
    longest: int = 0
    """Tokens of the longest sequence; 0 = not yet looked at."""
    choices: dict[str, Tensor] | None = None
    """Where routers leave the experts that they chose, [tokens, k] by name; None = nowhere."""


_thread = threading.local()


def current() -> Weights | None:
    """Weights of the forward running in this thread; None outside of `run`."""
    active: _Pass | None = getattr(_thread, "active", None)
    return None if active is None else active.weights


def attend(
    layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None
) -> Tensor:
    """Attention of the forward running in this thread; shapes as `Attend`.

    Args:
        window: sliding window that the layer asks for: a token sees itself and window - 1 before.

    Raises:
        ModelError: no forward of `run` is active in this thread, or a sequence outgrows `window`.
    """
    active = _active()
    if window is not None:
        _check_window(window, active)
    return active.attend(layer, q, k, v, scale)


def _active() -> _Pass:
    active: _Pass | None = getattr(_thread, "active", None)
    if active is None:
        raise ModelError(
            "an installed model was called directly, outside of treadle.models.forward.run",
            hint="its attention needs the layout that `run` gives it",
        )
    return active


def run(
    module: PreTrainedModel,
    ids: Tensor,
    positions: Tensor,
    attend: Attend,
    weights: Weights,
    choices: dict[str, Tensor] | None = None,
) -> Tensor:
    """One pass of the decoder.

    Args:
        module: an installed causal LM; its own parameters are not read.
        ids: token ids [B, T].
        positions: position ids [B, T].
        attend, weights: of this pass alone, seen by this thread alone.
        choices: filled with the experts that each of `routers(module)` chose, [tokens, k] int.

    Returns:
        Last hidden states [B, T, hidden]: after the final norm, before the head.

    Raises:
        ModelError: the module is not installed, or uses an attention feature we do not have.
    """
    if not is_installed(module):
        raise ModelError(f"{type(module).__name__} is not installed", hint="call install(module)")
    with _running(_Pass(attend, weights, positions, choices=choices)):
        output = module.get_decoder()(
            input_ids=ids, position_ids=positions, use_cache=False, return_dict=True
        )
    return output.last_hidden_state


def call(
    part: nn.Module, args: list[Any], kwargs: dict[str, Any], attend: Attend, weights: Weights
) -> tuple[Any, int | None]:
    """One part of an installed module alone: its output, and the sliding window it asked for."""
    active = _Pass(attend, weights, torch.zeros(1, 1, dtype=torch.int64))
    with _running(active):
        return part(*args, **kwargs), active.window


@contextmanager
def _running(active: _Pass) -> Iterator[None]:
    previous = getattr(_thread, "active", None)
    _thread.active = active
    try:
        yield
    finally:
        _thread.active = previous


# --------------------------------------------------------------------------- attention

_HARMLESS = frozenset({"position_ids", "use_cache", "cache", "past_key_values", "layer_idx"})
"""Keyword arguments that carry nothing the attention itself must honour."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **features: Any,
) -> tuple[Tensor, None]:
    """What transformers calls; checks that nothing asked for is ignored, then asks `Attend`."""
    if attention_mask is not None or dropout != 0.0:
        raise _unsupported("an attention mask" if dropout == 0.0 else "attention dropout", module)
    for name, given in features.items():
        if name not in _HARMLESS and given is not None and given is not False:
            raise _unsupported(f"`{name}`", module)
    if is_causal is False:
        raise _unsupported("bidirectional attention", module)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
    return attend(layer, query, key, value, scale, sliding_window), None


def _check_window(window: int, active: _Pass) -> None:
    """A window that no sequence outgrows is plain causal attention; a shorter one is refused."""
    active.window = window
    active.longest = active.longest or int(active.positions.max()) + 1
    if active.longest > window:
        raise ModelError(
            f"the model attends in a sliding window of {window} tokens, which is not supported "
            f"for a sequence of {active.longest}",
            hint=f"set model.max_context to at most {window}",
        )


def _unsupported(what: str, module: nn.Module) -> ModelError:
    return ModelError(
        f"{type(module).__name__} asks for {what}, which Treadle's attention does not compute",
        hint="choose a model with plain causal attention, e.g. of the llama or qwen family",
    )


def _no_mask(*_: object, **__: object) -> None:
    """The layout, not a mask, says who sees whom."""


# --------------------------------------------------------------------------- experts


def routers(module: PreTrainedModel) -> tuple[str, ...]:
    """Names of the modules that choose experts per token, in the order of their layers."""
    return tuple(
        name for name, m in module.named_modules() if type(m).__name__.endswith("TopKRouter")
    )


def experts_per_token(module: PreTrainedModel) -> int:
    """Experts that each router chooses for a token; 0 for a dense model."""
    counts = {int(module.get_submodule(name).top_k) for name in routers(module)}  # pyright: ignore
    return max(counts, default=0)


def _recorder(name: str) -> Any:
    def record(m: nn.Module, args: Any, output: Any) -> None:
        active: _Pass | None = getattr(_thread, "active", None)
        if active is not None and active.choices is not None:
            chosen = next(t for t in output if isinstance(t, Tensor) and not t.is_floating_point())
            active.choices[name] = chosen.detach().flatten(0, -2)

    return record


# --------------------------------------------------------------------------- residual stream


@contextmanager
def widened(module: PreTrainedModel) -> Iterator[None]:
    """Start the residual stream of an installed module in fp32; undone if the body raises.

    What layers add to it stays in the compute dtype, and so does what their norms take out of it:
    the sum alone is kept wide. Most of the noise of a bf16 forward is the rounding of that sum.
    """
    fields = module.get_input_embeddings().__dict__
    before = fields.get("treadle_wide", False)
    fields["treadle_wide"] = True
    try:
        yield
    except BaseException:
        fields["treadle_wide"] = before
        raise


def is_wide(module: PreTrainedModel) -> bool:
    """Whether the residual stream is fp32, whatever the compute dtype."""
    return bool(module.get_input_embeddings().__dict__.get("treadle_wide"))


# --------------------------------------------------------------------------- installation


class _Embedding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        weights = current()
        if weights is None:
            return super().forward(input)
        rows = weights.embedding(self.__dict__["treadle_name"], input)
        return rows.float() if self.__dict__.get("treadle_wide") else rows


class AskingLinear(nn.Linear):
    """A linear that `Weights.linear` computes while `run` is active."""

    treadle_name: str
    """Its name in the causal LM."""

    def forward(self, input: Tensor) -> Tensor:
        weights = current()
        if weights is None:
            return super().forward(input)
        return weights.linear(self.__dict__["treadle_name"], input)


@cache
def _asking(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass whose parameters are those of this thread's `Weights` while `run` is active.

    nn.Module keeps parameters outside of the instance dictionary and finds them through
    `__getattr__`, so overriding that alone covers every way in which a forward reads them.
    """

    def __getattr__(self: nn.Module, name: str) -> Any:
        weights = current()
        if weights is not None and name in self.__dict__["_parameters"]:
            if self.__dict__["_parameters"][name] is None:
                return None
            return weights.parameter(self.__dict__["treadle_prefix"] + name)
        return nn.Module.__getattr__(self, name)

    bases: tuple[type[nn.Module], ...] = (cls,)
    if cls is nn.Embedding:
        bases = (_Embedding,)
    elif issubclass(cls, nn.Embedding):
        # After cls in the method order: its super().forward() arrives at ours.
        bases = (cls, _Embedding)
    return type(cls.__name__, bases, {"__getattr__": __getattr__, "__module__": cls.__module__})


def linear_names(module: PreTrainedModel) -> tuple[str, ...]:
    """Names of the nn.Linear that `Weights.linear` computes: all except the output head.

    Fused expert tensors (mixture of experts) are plain parameters, hence not among them.
    """
    head = module.get_output_embeddings()
    return tuple(
        name
        for name, m in module.named_modules()
        if m is not head and (type(m) is nn.Linear or isinstance(m, AskingLinear))
    )


def is_installed(module: PreTrainedModel) -> bool:
    """Whether `install` was done."""
    return module.config._attn_implementation == IMPLEMENTATION


def install(module: PreTrainedModel) -> None:
    """Make the module ask the current `Weights` and `Attend`. Idempotent; in place.

    Raises:
        ModelError: the model's attention does not go through transformers' attention interface.
    """
    if is_installed(module):
        return
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
    module.set_attn_implementation(IMPLEMENTATION)
    if module.config._attn_implementation != IMPLEMENTATION:
        raise ModelError(
            f"{type(module).__name__} does not use transformers' attention interface",
            hint="choose a model whose attention can be replaced, e.g. of the llama or qwen family",
        )
    for name in routers(module):
        module.get_submodule(name).register_forward_hook(_recorder(name))
    head = module.get_output_embeddings()
    for name, m in module.named_modules():
        if m is head or not m._parameters or "treadle_name" in m.__dict__:
            continue
        if type(m) is nn.Linear:
            m.__class__ = AskingLinear
            m.__dict__["treadle_name"] = name
        else:
            m.__class__ = _asking(type(m))  # pyright: ignore[reportAttributeAccessIssue]
            m.__dict__["treadle_name"] = name
            m.__dict__["treadle_prefix"] = f"{name}." if name else ""

"""Start-up proof that the packed forward is the library's model.

A model whose tokens meet anywhere but in the attention (state-space or convolution layers), whose
logits are transformed, or whose positions are derived in another way would train on wrong numbers
in silence. One tiny pack with a shared prefix and a neighbour tree shows all of these. Where
the module then runs with an fp32 residual stream, it is given one (forward.py).

Takes: a causal LM before and after installation. Gives: nothing, or ModelError.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from transformers import PreTrainedModel

from treadle.errors import ModelError
from treadle.models import forward
from treadle.models.attention import PackedAttend
from treadle.models.head import HeadSpec
from treadle.models.linear import CastWeights, PlainWeights
from treadle.types import Layout, Segment

logger = logging.getLogger(__name__)

TOLERANCE = 1e-3
"""Largest difference relative to the largest logit; fp32, so noise is far below."""

_LAYOUT = Layout(
    (Segment(0, 3, None, 0), Segment(3, 2, 0, 3), Segment(5, 4, 0, 3), Segment(9, 5, None, 0))
)
_ROWS = ((0, 1, 2, 3, 4), (0, 1, 2, 5, 6, 7, 8), (9, 10, 11, 12, 13))
"""Packed indices of the three sequences of the layout."""


@torch.no_grad()
def widen(module: PreTrainedModel) -> bool:
    """Keep the residual stream of an installed module in fp32, if its parts can take one.

    Parts that we did not replace (fuse.py) may mix its dtype with that of their weights.
    """
    attend = PackedAttend(_LAYOUT, device=module.device)
    weights = CastWeights(dict(module.named_parameters()), torch.bfloat16)
    try:
        with forward.widened(module):
            hidden = forward.run(module, _ids(module)[None], attend.positions, attend, weights)
            if hidden.dtype != torch.bfloat16:
                raise TypeError(f"the last norm gives {hidden.dtype}")
    except (TypeError, RuntimeError) as error:
        logger.info("%s keeps a narrow residual stream: %s", type(module).__name__, error)
        return False
    return True


def _ids(module: PreTrainedModel) -> Tensor:
    """Fixed ids, spread over the vocabulary."""
    vocab: int = module.get_input_embeddings().weight.shape[0]  # pyright: ignore
    return (torch.arange(1, _LAYOUT.num_tokens + 1) * 7919 % vocab).to(module.device)


@torch.no_grad()
def library_logits(module: PreTrainedModel) -> tuple[Tensor, ...]:
    """Logits of the library's own forward, one sequence at a time; before `install`."""
    ids = _ids(module)
    return tuple(
        module(input_ids=ids[list(row)][None], use_cache=False).logits[0].float() for row in _ROWS
    )


@torch.no_grad()
def check(module: PreTrainedModel, head: HeadSpec, want: tuple[Tensor, ...]) -> None:
    """Compare the packed forward of an installed module with `want`.

    Raises:
        ModelError: they differ by more than TOLERANCE.
    """
    attend = PackedAttend(_LAYOUT, device=module.device)
    tensors = {name: p.detach() for name, p in module.named_parameters()}
    ids = _ids(module)[None]
    hidden = forward.run(module, ids, attend.positions, attend, PlainWeights(tensors))[0]
    got = hidden.float() @ tensors[head.name].float().t() * head.scale
    worst = max(
        float((got[list(row)] - logits).abs().max())
        for row, logits in zip(_ROWS, want, strict=True)
    )
    largest = max(float(logits.abs().max()) for logits in want)
    if not worst <= TOLERANCE * largest:
        raise ModelError(
            f"{type(module).__name__}: the packed forward differs from the library's by {worst:.2g}"
            f" (logits up to {largest:.2g}), so it would train on wrong numbers",
            hint="its layers mix tokens outside of attention, or its logits are transformed: "
            "choose a plain decoder, e.g. of the llama or qwen family",
        )

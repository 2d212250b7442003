"""Weights in the block layout that the CPU's matrix kernels want, for products of a few rows.

Guarantees: a packed product means the same as the plain one; the plain copy of a packed weight is
not kept. Packing once per publication saves a third of the time of a product of 8 rows and a
fifth of one of 64.

Takes: a Snapshot. Gives: `forward.Weights`, and fp32 logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.models.linear import PlainWeights
from treadle.models.policy import Snapshot

ROWS_HINT = 64
"""Rows of a product for which the layout is chosen; any number works."""


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build and this CPU have packed products in `dtype`."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


class PackedWeights(PlainWeights):
    """`forward.Weights` with packed linears and a packed head."""

    def __init__(self, snapshot: Snapshot) -> None:
        packed = {f"{name}.weight" for names in snapshot.fused for name in names}
        super().__init__({n: t for n, t in snapshot.tensors.items() if n not in packed})
        self._packed = {
            names: (_pack(fused.weight), fused.bias, fused.sizes)
            for names, fused in snapshot.fused.items()
        }
        # Nobody asks these linears alone when they were fused, but a module may.
        self._whole = {name: names for names in snapshot.fused for name in names}
        self._head = _pack(snapshot.head)

    def linear(self, name: str, x: Tensor) -> Tensor:
        names = self._whole[name]
        return self.linears(names, x)[names.index(name)]

    def linears(self, names: tuple[str, ...], x: Tensor) -> tuple[Tensor, ...]:
        if names not in self._packed:
            return tuple(self.linear(name, x) for name in names)
        weight, bias, sizes = self._packed[names]
        product = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product.split(sizes, dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [n, V], by the arithmetic of `models.head.logits`."""
        product = torch.ops.mkldnn._linear_pointwise
        rough = product(hidden, self._head, None, "none", [], "")
        if hidden.dtype == torch.float32:
            return rough
        residual = product.binary(hidden, -rough, self._head, None, "add")
        return rough.float().add_(residual.float())


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)

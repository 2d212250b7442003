"""The policy: the one set of weights that the trainer changes and the engine samples from.

Guarantees:
- masters are fp32; compute copies in `dtype` are made from them by `refresh` alone, as new
  tensors, so that a snapshot taken before stays what it was;
- a forward or a snapshot after an optimiser step without `refresh` is refused;
- a merged weight is W + s B A in fp32, rounded once: updates smaller than the rounding of W
  still move it in the right direction on average, because the fp32 base lies off the bf16 grid;
- the model was proven equal to the library's when it was taken over (see proof.py);
- what it computed at a moment it can compute again, bit for bit, with its own weights untouched;
- the reference policy is what the policy was at `freeze_reference`: with LoRA the base model, or
  the base with a copy of an adapter that was trained before, made on use; in full fine-tuning the
  compute copies of that moment, kept.

LoRA covers every nn.Linear except the output head; fused expert tensors stay frozen.

Takes: LoadedModel. Gives: hidden states, logprobs, snapshots.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from treadle.config import LoraConfig
from treadle.errors import ContractError, ModelError
from treadle.models import forward, fuse, proof
from treadle.models.attention import PackedAttend
from treadle.models.head import HeadSpec, head_spec, token_logprobs
from treadle.models.linear import (
    Adapter,
    CastWeights,
    FullWeights,
    Fused,
    LoraPair,
    LoraWeights,
    PlainWeights,
)
from treadle.models.load import LoadedModel
from treadle.types import Layout, ModelShape

Moment = Adapter | PlainWeights
"""What a policy computed at one moment: a copy of its adapter, or, in full fine-tuning, the compute
copies of all weights. Nothing overwrites its tensors."""

PEFT_PREFIX = "base_model.model."
"""What PEFT puts before a module's name in its files."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Weights of one moment, merged, in the compute dtype. Nothing overwrites its tensors."""

    tensors: Mapping[str, Tensor]
    """Every parameter by its own name, adapters merged."""
    fused: Mapping[tuple[str, ...], Fused]
    """Linears that the module asks together; their tensors are slices of these."""
    head: Tensor
    """[V, hidden]; the embedding itself when they are tied."""
    head_spec: HeadSpec
    fingerprint: str
    """Of the masters that it was made from."""

    @property
    def weights(self) -> PlainWeights:
        """As `forward.Weights`."""
        return PlainWeights(self.tensors, self.fused)


class Policy:
    """See the module's docstring. One thread trains; any thread may take a snapshot between steps.

    Raises:
        ModelError: the model cannot be computed exactly (see forward, head, proof), or its
            parameters are not fp32.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        lora: LoraConfig | None,
        dtype: torch.dtype,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ModelError(f"compute dtype must be float32 or bfloat16, got {dtype}")
        self.loaded = loaded
        self.lora = lora
        self.dtype = dtype
        self.device = device
        module: PreTrainedModel = loaded.module.to(device)
        self._module = module
        self.head = head_spec(module)
        self._base = dict(module.named_parameters())
        for name, p in self._base.items():
            if p.dtype != torch.float32:
                raise ModelError(f"{name} is {p.dtype}; a policy keeps its weights in float32")
        together = _take_over(module, self.head)
        self._units = _units(forward.linear_names(module), together, self._base)
        self._thread = threading.local()
        self._reference: forward.Weights | None = None
        self._masters: dict[str, nn.Parameter]
        self._pairs: dict[str, LoraPair] = {}
        module.requires_grad_(lora is None)
        if lora is None:
            self._masters = self._base
        else:
            self._masters = self._new_adapters(lora, seed)
        self._frozen = self._compute_others() if lora is not None else None
        self._weights: LoraWeights | FullWeights
        self._versions: list[int] = []
        self.refresh()

    @property
    def module(self) -> PreTrainedModel:
        """The installed causal LM: for `forward.run`, by any thread."""
        return self._module

    @property
    def shape(self) -> ModelShape:
        return self.loaded.shape

    @property
    def scale(self) -> float:
        """What B A is multiplied by: alpha / rank; 0 without an adapter."""
        return self.lora.alpha / self.lora.rank if self.lora is not None else 0.0

    @property
    def pairs(self) -> Mapping[str, LoraPair]:
        """Adapters by the name of their linear; empty in full fine-tuning."""
        return self._pairs

    def parameters(self) -> dict[str, nn.Parameter]:
        """fp32 masters, for the optimiser. LoRA: under the keys of PEFT's files."""
        return dict(self._masters)

    def _new_adapters(self, lora: LoraConfig, seed: int) -> dict[str, nn.Parameter]:
        if not forward.linear_names(self._module):
            raise ModelError(
                f"{type(self._module).__name__} has no linear layer that LoRA could adapt",
                hint="its projections are of another class; train all parameters (model.lora=none)",
            )
        generator = torch.Generator().manual_seed(seed)
        masters: dict[str, nn.Parameter] = {}
        for name in forward.linear_names(self._module):
            out_features, in_features = self._base[f"{name}.weight"].shape
            a = torch.empty(lora.rank, in_features)
            nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
            pair = LoraPair(
                nn.Parameter(a.to(self.device)),
                nn.Parameter(torch.zeros(out_features, lora.rank, device=self.device)),
            )
            self._pairs[name] = pair
            masters[f"{PEFT_PREFIX}{name}.lora_A.weight"] = pair.a  # pyright: ignore
            masters[f"{PEFT_PREFIX}{name}.lora_B.weight"] = pair.b  # pyright: ignore
        return masters

    # ----------------------------------------------------------------------- compute copies

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the compute copies from the masters; call it after each optimiser step."""
        tensors, fused = self._merged(self._pairs)
        if self.lora is not None:
            self._weights = LoraWeights(tensors, fused, self._pairs, self.scale)
        else:
            self._weights = FullWeights(tensors, fused, self._base)
        self._versions = self._current_versions()

    def _merged(
        self, pairs: Mapping[str, LoraPair]
    ) -> tuple[dict[str, Tensor], dict[tuple[str, ...], Fused]]:
        """Compute copies of everything with these adapters, as new tensors: `tensors` and `fused`
        of PlainWeights."""
        tensors = dict(self._frozen if self._frozen is not None else self._compute_others())
        fused: dict[tuple[str, ...], Fused] = {}
        for unit in self._units:
            fused[unit] = f = self._merge(unit, pairs)
            for name, (start, stop) in zip(unit, f.bounds(), strict=True):
                tensors[f"{name}.weight"] = f.weight[start:stop]
                if f.bias is not None:
                    tensors[f"{name}.bias"] = f.bias[start:stop]
        return tensors, fused

    def _compute_others(self) -> dict[str, Tensor]:
        """Everything that is not a linear. Copied when it is trained, so that it never aliases."""
        linear = {f"{n}.{end}" for unit in self._units for n in unit for end in ("weight", "bias")}
        return {
            name: p.detach().to(self.dtype, copy=self.lora is None)
            for name, p in self._base.items()
            if name not in linear
        }

    def adapter(self) -> Adapter:
        """A copy of the adapter as it is now.

        Raises:
            ModelError: full fine-tuning has none.
        """
        if self.lora is None:
            raise ModelError("full fine-tuning has no adapter")
        return Adapter(
            {
                n: LoraPair(p.a.detach().clone(), p.b.detach().clone())
                for n, p in self.pairs.items()
            },
            self.scale,
        )

    @torch.no_grad()
    def base(self) -> PlainWeights:
        """The model below the adapter in the compute dtype, as new tensors.

        Raises:
            ModelError: full fine-tuning keeps no base.
        """
        if self._frozen is None:
            raise ModelError("full fine-tuning keeps no base below the weights that it trains")
        return PlainWeights(*self._merged({}))

    def _merge(self, names: tuple[str, ...], pairs: Mapping[str, LoraPair]) -> Fused:
        sizes = tuple(self._base[f"{n}.weight"].shape[0] for n in names)
        width = self._base[f"{names[0]}.weight"].shape[1]
        weight = torch.empty(sum(sizes), width, dtype=self.dtype, device=self.device)
        biases = [self._base[f"{n}.bias"] for n in names if f"{n}.bias" in self._base]
        bias = torch.cat([b.detach() for b in biases]).to(self.dtype) if biases else None
        fused = Fused(names, weight, bias, sizes)
        for name, (start, stop) in zip(names, fused.bounds(), strict=True):
            weight[start:stop].copy_(self._sum(name, pairs))
        return fused

    @torch.no_grad()
    def merged(self, name: str) -> Tensor:
        """W + s B A of one linear in fp32 [out, in], from the masters; a new tensor with LoRA."""
        return self._sum(name, self._pairs)

    def _sum(self, name: str, pairs: Mapping[str, LoraPair]) -> Tensor:
        base = self._base[f"{name}.weight"].detach()
        pair = pairs.get(name)
        return base if pair is None else torch.addmm(base, pair.b, pair.a, alpha=self.scale)

    def _current_versions(self) -> list[int]:
        return [p._version for p in self._masters.values()]

    def _check_fresh(self) -> None:
        if self._versions != self._current_versions():
            raise ContractError(
                "the policy's parameters changed since its weights were computed",
                hint="call policy.refresh() after each optimiser step",
            )

    # ----------------------------------------------------------------------- forward

    def hidden(self, ids: Tensor, layout: Layout) -> Tensor:
        """Last hidden states of packed tokens, with gradient.

        Args:
            ids: token ids [N] in the order of `layout`.

        Returns:
            [N, hidden] in `dtype`, after the final norm; row i predicts the token after i.

        Raises:
            ContractError: the layout does not fit, or `refresh` was not called after a step.
        """
        self._check_fresh()
        if ids.shape != (layout.num_tokens,):
            raise ContractError(f"ids {tuple(ids.shape)} for a layout of {layout.num_tokens}")
        attend = PackedAttend(layout, device=self.device)
        weights: forward.Weights = getattr(self._thread, "instead", None) or self._weights
        ids = ids.to(self.device)[None]
        return forward.run(self._module, ids, attend.positions, attend, weights)[0]

    def logprobs(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: float | Tensor,
        *,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Logprob of each target after the token of its hidden state; see `head.token_logprobs`.

        Args:
            hidden: rows of `hidden()` [n, hidden].
            targets: token ids [n].
            temperature: > 0, a number or one per row.
            entropy_gradient: the entropies carry a gradient too.

        Returns:
            logprobs [n] with gradient and entropies [n], without unless asked; fp32, nats.
        """
        instead = getattr(self._thread, "instead", None)
        # LoRA never adapts the head: with or without it, the head is the same.
        if instead is None or self.lora is not None:
            head = self._weights.tensors[self.head.name]
        else:
            head = instead.parameter(self.head.name)
        trained = self.lora is None and instead is None
        return token_logprobs(
            hidden,
            head,
            targets.to(self.device),
            temperature,
            scale=self.head.scale,
            master=self._base[self.head.name] if trained else None,
            entropy_gradient=entropy_gradient,
        )

    @contextmanager
    def adapter_off(self) -> Iterator[None]:
        """The base model, for forwards of this thread: the reference policy.

        Raises:
            ModelError: full fine-tuning keeps no base.
        """
        if self.lora is None:
            raise ModelError(
                "full fine-tuning keeps no copy of the base model to compare with",
                hint="train with LoRA, or load the reference model as a policy of its own",
            )
        with self._instead(CastWeights(self._base, self.dtype)):
            yield

    @torch.no_grad()
    def freeze_reference(self) -> None:
        """Make what the policy computes now the reference policy.

        LoRA keeps nothing of an adapter whose B is 0, else a copy of the adapter. Full fine-tuning
        keeps the compute copies of all weights, in `dtype`, which are replaced and never written.

        Raises:
            ContractError: `refresh` was not called after a step.
        """
        self._check_fresh()
        if self.lora is None:
            self._reference = PlainWeights(self._weights.tensors, self._weights.fused)
        elif any(bool(pair.b.any()) for pair in self._pairs.values()):
            frozen = self.adapter()
            self._reference = CastWeights(self._base, self.dtype, frozen.pairs, frozen.scale)
        else:
            self._reference = CastWeights(self._base, self.dtype)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """The reference policy, for forwards of this thread; without gradients.

        Raises:
            ContractError: `freeze_reference` was never called.
        """
        if self._reference is None:
            raise ContractError(
                "the policy has no reference policy to compare with",
                hint="call policy.freeze_reference() before training",
            )
        with torch.no_grad(), self._instead(self._reference):
            yield

    @torch.no_grad()
    def moment(self) -> Moment:
        """What the policy computes now, for `at`. LoRA copies the adapter; full fine-tuning copies
        nothing, but its compute copies, which an update replaces, live as long as the moment.

        Raises:
            ContractError: `refresh` was not called after a step.
        """
        self._check_fresh()
        if self.lora is None:
            return PlainWeights(self._weights.tensors, self._weights.fused)
        return self.adapter()

    @contextmanager
    def at(self, moment: Moment) -> Iterator[None]:
        """The policy of a moment, for forwards of this thread; without gradients, and with the bits
        that they had then. LoRA merges the adapter anew: the compute copies of one more model."""
        with torch.no_grad():
            if isinstance(moment, Adapter):
                moment = PlainWeights(*self._merged(moment.pairs))
            with self._instead(moment):
                yield

    @contextmanager
    def _instead(self, weights: forward.Weights) -> Iterator[None]:
        before = getattr(self._thread, "instead", None)
        self._thread.instead = weights
        try:
            yield
        finally:
            self._thread.instead = before

    # ----------------------------------------------------------------------- publication

    def snapshot(self) -> Snapshot:
        """The current compute copies; shares memory with nothing that changes.

        Raises:
            ContractError: `refresh` was not called after a step.
        """
        self._check_fresh()
        weights = self._weights
        return Snapshot(
            tensors=weights.tensors,
            fused=weights.fused,
            head=weights.tensors[self.head.name],
            head_spec=self.head,
            fingerprint=self.fingerprint(),
        )

    def fingerprint(self) -> str:
        """16 hex digits over names and bits of the masters; every change of a bit shows."""
        digest = hashlib.sha256()
        for name, p in self._masters.items():
            digest.update(f"{name} {tuple(p.shape)}\n".encode())
            digest.update(p.detach().cpu().contiguous().numpy().data)
        return digest.hexdigest()[:16]


def _take_over(module: PreTrainedModel, head: HeadSpec) -> tuple[tuple[str, ...], ...]:
    """Install and fuse; a module that is new to us is compared with the library's forward."""
    if module.__dict__.get("treadle_proven"):
        return fuse.fuse(module)
    if forward.is_installed(module):
        # Refused before, or installed by hand: back to the library's own attention first.
        module.set_attn_implementation("eager")
    want = proof.library_logits(module)
    forward.install(module)
    together = fuse.fuse(module)
    proof.check(module, head, want)
    proof.widen(module)
    module.__dict__["treadle_proven"] = True
    return together


def _units(
    linears: tuple[str, ...], together: tuple[tuple[str, ...], ...], base: Mapping[str, Tensor]
) -> tuple[tuple[str, ...], ...]:
    """Linears grouped as the module asks them; a group has biases everywhere or nowhere."""
    units = [names for names in together if len({f"{name}.bias" in base for name in names}) == 1]
    grouped = {name for names in units for name in names}
    return (*units, *((name,) for name in linears if name not in grouped))

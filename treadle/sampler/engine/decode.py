"""From ids to logits, under the weights that were loaded last.

Two paths with one meaning. The torch path runs the library's module with our attention and is
the reference: every model, dtype and device. The native path (native/) serves Llama-like models
in bf16 on CPUs that have the instructions; its logits, KV and draws mean the same.

Guarantees: `load` checks everything before it changes anything; logits are fp32.

Takes: token ids with their block tables. Gives: logits, or draws where the native path is on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treadle.errors import WeightsError
from treadle.models import forward, head
from treadle.models.attention import PackedAttend
from treadle.models.linear import Adapter, PlainWeights
from treadle.models.policy import Policy, Snapshot
from treadle.sampler.engine import native
from treadle.sampler.engine.adapters import GroupedWeights, LoadedAdapter, Run
from treadle.sampler.engine.adapters import check as check_adapter
from treadle.sampler.engine.blocks import BLOCK, blocks_for
from treadle.sampler.engine.kv import KvStore
from treadle.sampler.engine.packed import PackedWeights, can_pack
from treadle.sampler.engine.paged import PagedAttend, Span
from treadle.sampler.engine.sampling import Draws
from treadle.types import Layout, Scores, Segment

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens to compute."""

    ids: Sequence[int]
    position: int
    """Of its first token; all before it have KV."""
    blocks: Sequence[int]
    """The table of its sequence."""
    adapter: str = ""


class Decoder:
    """The model of one engine. `load` before anything else."""

    def __init__(self, policy: Policy, store: KvStore, *, adapters: bool = False) -> None:
        """`adapters`: named adapters may be served beside the snapshot."""
        self._policy = policy
        self._adapters: dict[str, LoadedAdapter] = {}
        self._base: PlainWeights | None = None
        self._module = policy.module
        self._shape = policy.shape
        self._dtype = policy.dtype
        self._device = torch.device(policy.device)
        self._store = store
        self._head = policy.head
        self._routers = forward.routers(policy.module)
        self._expected: dict[str, torch.Size] | None = None
        self._weights: PlainWeights | None = None
        self._native: native.NativeDecoder | None = None
        self.refusal = native.refusal(self._shape, self._module.config, self._dtype)
        """Why the native path is off; None = it is on."""
        if adapters:
            self.refusal = "it serves named adapters"
        if self._device.type != "cpu":
            self.refusal = f"the device is {self._device}"
        if self.refusal is not None:
            logger.info("decoding in torch: %s", self.refusal)

    @property
    def draws(self) -> bool:
        """Whether `decode_draw` is there."""
        return self._native is not None

    def load(self, snapshot: Snapshot) -> None:
        """Serve a snapshot from the next call on.

        Raises:
            WeightsError: names or shapes are not those of the first snapshot, or a value is not
                finite. The old weights keep serving.
        """
        self._check(snapshot.tensors)
        if self.refusal is None:
            if self._native is None:
                config, store = self._module.config, self._store
                self._native = native.load(self._shape, snapshot, config, store.keys, store.values)
            else:
                self._native.update(snapshot)
            # Only `score` runs in torch then: not worth a second, packed copy.
            self._weights = snapshot.weights
        elif can_pack(self._device, self._dtype):
            self._weights = PackedWeights(snapshot)
        else:
            self._weights = snapshot.weights
        self._expected = {name: tensor.shape for name, tensor in snapshot.tensors.items()}

    def load_adapter(self, name: str, adapter: Adapter) -> None:
        """Serve an adapter under a name from the next call on.

        Raises:
            WeightsError: it does not fit the model, or is not finite; the old one serves on.
        """
        weights = dict(self._module.named_parameters())
        names = forward.linear_names(self._module)
        shapes = {n: tuple(weights[f"{n}.weight"].shape) for n in names}
        check_adapter(adapter, shapes, name)  # pyright: ignore[reportArgumentType]
        if self._base is None and self._policy.lora is not None:
            self._base = self._policy.base()
        self._adapters[name] = LoadedAdapter(adapter, self._dtype, self._device)

    def drop_adapter(self, name: str) -> None:
        self._adapters.pop(name, None)

    def _weights_of(self, runs: Sequence[Run]) -> forward.Weights:
        """Of a pass whose tokens belong to `runs`, those of no adapter first."""
        assert self._weights is not None, "no weights were loaded"
        if not runs or not runs[-1].adapter:
            return self._weights
        return GroupedWeights(self._weights, self._base or self._weights, self._adapters, runs)

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        if self._expected is not None and shapes != self._expected:
            odd = set(shapes.items()) ^ set(self._expected.items())
            name = min(name for name, _ in odd)
            raise WeightsError(
                f"{len({name for name, _ in odd})} tensors differ from those served, first "
                f"`{name}`: {_size(self._expected.get(name))} served, {_size(shapes.get(name))} now"
            )
        for name, tensor in tensors.items():
            # One pass, no temporary: a sum is finite only if every term is.
            if not torch.isfinite(tensor.sum(dtype=torch.float32)):
                bad = int((~torch.isfinite(tensor)).sum())
                if bad:
                    raise WeightsError(
                        f"`{name}` has {bad} of {tensor.numel()} values that are not finite",
                        hint="the update diverged: lower learn.lr or learn.grad_clip",
                    )

    # ------------------------------------------------------------------ passes

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute prompts together, writing their KV; fp32 logits [chunks, vocab] of each last.

        Chunks come in the order of their adapters' names.
        """
        ids = np.concatenate([np.asarray(c.ids, np.int64) for c in chunks])
        ends = np.cumsum([len(c.ids) for c in chunks])
        if self._native is not None:
            return self._prefill_native(chunks, ids, ends - 1)
        spans = [
            Span(int(end) - len(c.ids), len(c.ids), c.position, c.blocks)
            for c, end in zip(chunks, ends, strict=True)
        ]
        runs = _runs([(c.adapter, len(c.ids)) for c in chunks])
        return self._logits(self._hidden(ids, spans, runs)[torch.from_numpy(ends - 1)])

    def _prefill_native(
        self, chunks: Sequence[Chunk], ids: NDArray[np.int64], last: NDArray[np.int64]
    ) -> Tensor:
        assert self._native is not None, "called without a native decoder"
        width = max(blocks_for(c.position + len(c.ids)) for c in chunks)
        counts = [len(c.ids) for c in chunks]
        tables = np.repeat(tables_of([c.blocks for c in chunks], width), counts, axis=0)
        positions = np.concatenate(
            [np.arange(c.position, c.position + len(c.ids), dtype=np.int32) for c in chunks]
        )
        return self._native.prefill(*map(torch.from_numpy, (ids, positions, tables, last)))

    @torch.inference_mode()
    def decode(
        self,
        ids: NDArray[np.int64],
        positions: NDArray[np.int32],
        tables: NDArray[np.int32],
        adapters: Sequence[str] = (),
    ) -> Tensor:
        """One token per row, writing its KV; fp32 logits [rows, vocab].

        Args:
            ids, positions: [rows].
            tables: [rows, width], `tables[r, p // BLOCK]` holds position p of row r.
            adapters: of each row, in the order of their names; empty = none has one.
        """
        if self._native is not None:
            return self._native.step(*map(torch.from_numpy, (ids, positions, tables)))
        spans = [Span(i, 1, p, tables[i]) for i, p in enumerate(positions.tolist())]
        return self._logits(self._hidden(ids, spans, _runs([(name, 1) for name in adapters])))

    def decode_draw(
        self,
        ids: NDArray[np.int64],
        positions: NDArray[np.int32],
        tables: NDArray[np.int32],
        temperature: Tensor,
        uniform: Tensor,
    ) -> Draws:
        """As `decode` and one plain draw per row (see `sampling.draw`); where `draws` says so."""
        assert self._native is not None, "called without a native decoder"
        i, p, t = map(torch.from_numpy, (ids, positions, tables))
        return Draws(*self._native.step_sample(i, p, t, temperature, uniform))

    @torch.inference_mode()
    def score(
        self, ids: Sequence[int], start: int, temperature: float, adapter: str = ""
    ) -> Tensor:
        """fp32 logprobs of ids[start:], each given all before it; touches no KV."""
        hidden, head_weight = self._forced(ids, adapter)
        logprobs, _ = head.token_logprobs(
            hidden[start - 1 : -1],
            head_weight,
            torch.tensor(ids[start:], device=self._device),
            temperature,
            scale=self._head.scale,
        )
        return logprobs

    @torch.inference_mode()
    def scores(
        self,
        ids: Sequence[int],
        start: int,
        temperature: float,
        top: int,
        labels: Sequence[int],
        adapter: str = "",
    ) -> Scores:
        """As `score`, with the `top` most probable ids and the logprobs of `labels`."""
        hidden, head_weight = self._forced(ids, adapter)
        chosen = torch.tensor(ids[start:], device=self._device)[:, None]
        wanted = torch.tensor(labels, dtype=torch.int64, device=self._device)
        parts: list[tuple[Tensor, ...]] = []
        for rows in range(0, len(chosen), head.CHUNK):
            part = slice(rows, rows + head.CHUNK)
            logits = head.logits(hidden[start - 1 : -1][part], head_weight)
            logp = logits.mul_(self._head.scale / temperature).log_softmax(-1)
            best = logp.sort(dim=-1, descending=True, stable=True).indices[:, :top]
            given = logp.gather(1, chosen[part])[:, 0]
            parts.append((given, best, logp.gather(1, best), logp[:, wanted]))
        given, best, best_logp, labelled = (
            (
                [row for part in column for row in part.tolist()]
                for column in zip(*parts, strict=True)
            )
            if parts
            else ([], [], [], [])
        )
        return Scores(
            logprobs=tuple(given),
            top_ids=tuple(map(tuple, best)),
            top_logprobs=tuple(map(tuple, best_logp)),
            label_logprobs=tuple(map(tuple, labelled)),
        )

    def _forced(self, ids: Sequence[int], adapter: str) -> tuple[Tensor, Tensor]:
        """Hidden states of a whole sequence [tokens, hidden], and the head's weight."""
        assert self._weights is not None, "no weights were loaded"
        attend = PackedAttend(Layout((Segment(0, len(ids), None, 0),)), device=self._device)
        given = torch.tensor(ids, device=self._device)
        weights = self._weights_of([Run(adapter, 0, len(ids))])
        hidden = forward.run(self._module, given[None], attend.positions, attend, weights)[0]
        return hidden, self._weights.tensors[self._head.name]

    def _hidden(self, ids: NDArray[np.int64], spans: Sequence[Span], runs: Sequence[Run]) -> Tensor:
        """Last hidden states [tokens, hidden] in the torch path; records the experts' choices."""
        positions = np.concatenate([np.arange(s.position, s.position + s.count) for s in spans])
        choices: dict[str, Tensor] | None = None if self._store.experts is None else {}
        hidden = forward.run(
            self._module,
            torch.from_numpy(ids)[None].to(self._device),
            torch.from_numpy(positions)[None].to(self._device),
            PagedAttend(self._store, spans),
            self._weights_of(runs),
            choices,
        )[0]
        if choices:
            blocks = np.concatenate(
                [
                    np.asarray(s.blocks)[np.arange(s.position, s.position + s.count) // BLOCK]
                    for s in spans
                ]
            )
            rows = torch.from_numpy(blocks * BLOCK + positions % BLOCK).to(self._device)
            self._store.write_experts(rows, torch.stack([choices[n] for n in self._routers], 1))
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        assert self._weights is not None, "no weights were loaded"
        if isinstance(self._weights, PackedWeights):
            logits = self._weights.logits(hidden)
        else:
            logits = head.logits(hidden, self._weights.tensors[self._head.name])
        return logits if self._head.scale == 1.0 else logits.mul_(self._head.scale)


def _runs(counts: Sequence[tuple[str, int]]) -> list[Run]:
    """Neighbours of one adapter together."""
    runs: list[Run] = []
    end = 0
    for name, count in counts:
        start, end = end, end + count
        if runs and runs[-1].adapter == name:
            start = runs.pop().start
        runs.append(Run(name, start, end))
    return runs


def tables_of(blocks: Sequence[Sequence[int]], width: int) -> NDArray[np.int32]:
    """Block tables as an array [rows, width]; cut or filled with 0."""
    tables = np.zeros((len(blocks), width), np.int32)
    for i, row in enumerate(blocks):
        held = row[:width]
        tables[i, : len(held)] = held
    return tables


def _size(shape: torch.Size | None) -> str:
    return "absent" if shape is None else str(tuple(shape))

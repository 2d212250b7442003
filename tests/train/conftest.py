"""A tiny pure-torch policy with the trainer's interface, and samples drawn from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from treadle.types import Layout, ModelShape, Sample, Segment

VOCAB, WIDTH, CONTEXT = 12, 16, 64


class ToyPolicy:
    """One attention layer over a Layout, written for clarity: a dense mask, no chunks."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator) * 0.3)

        self._parameters = {
            "embedding": weight(VOCAB, WIDTH),
            "position": weight(CONTEXT, WIDTH),
            "query": weight(WIDTH, WIDTH),
            "key": weight(WIDTH, WIDTH),
            "value": weight(WIDTH, WIDTH),
            "head": weight(VOCAB, WIDTH),
        }
        self.shape = ModelShape(
            family="toy",
            layers=1,
            hidden=WIDTH,
            heads=1,
            kv_heads=1,
            head_dim=WIDTH,
            intermediate=0,
            vocab=VOCAB,
            tied=False,
            parameters=sum(p.numel() for p in self._parameters.values()),
            max_context=CONTEXT,
        )
        self.dtype = torch.float32
        self.device = "cpu"
        self.refreshed = 0
        self._drawn: dict[object, Tensor] = {}

    def parameters(self) -> dict[str, nn.Parameter]:
        return self._parameters

    def refresh(self) -> None:
        self.refreshed += 1
        self._drawn.clear()

    def hidden(self, ids: Tensor, layout: Layout) -> Tensor:
        positions, mask = torch.zeros_like(ids), torch.zeros(len(ids), len(ids), dtype=torch.bool)
        for i, segment in enumerate(layout.segments):
            own = slice(segment.start, segment.start + segment.length)
            positions[own] = torch.arange(segment.length) + segment.position
            mask[own, own] = torch.ones(segment.length, segment.length).tril().bool()
            for j in layout.ancestors(i):
                other = layout.segments[j]
                mask[own, other.start : other.start + other.length] = True
        p = self._parameters
        x = p["embedding"][ids] + p["position"][positions]
        scores = (x @ p["query"]) @ (x @ p["key"]).T / math.sqrt(WIDTH)
        attention = scores.masked_fill(~mask, -math.inf).softmax(-1)
        return torch.tanh(x + attention @ (x @ p["value"]))

    def logprobs(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: float | Tensor,
        *,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        logits = hidden @ self._parameters["head"].T
        scale = temperature[:, None] if isinstance(temperature, Tensor) else temperature
        logp = (logits / scale).log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        chosen = logp.gather(1, targets[:, None])[:, 0]
        return chosen, entropy if entropy_gradient else entropy.detach()

    def freeze_reference(self) -> None:
        self._frozen = {name: p.detach().clone() for name, p in self._parameters.items()}

    @contextmanager
    def reference(self) -> Iterator[None]:
        now = self._parameters
        self._parameters = self._frozen
        try:
            with torch.no_grad():
                yield
        finally:
            self._parameters = now

    def moment(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self._parameters.items()}

    @contextmanager
    def at(self, moment: dict[str, Tensor]) -> Iterator[None]:
        now = self._parameters
        self._parameters = moment
        try:
            with torch.no_grad():
                yield
        finally:
            self._parameters = now

    # ------------------------------------------------------------------ for the tests

    @torch.no_grad()
    def distribution(self, ids: Sequence[int], temperature: float = 1.0) -> Tensor:
        """log pi(. | ids), one row at a time: nothing packed, nothing shared."""
        key = (*ids, temperature, *(p._version for p in self._parameters.values()))
        if key not in self._drawn:
            row = Layout((Segment(0, len(ids), None, 0),))
            hidden = self.hidden(torch.tensor(ids), row)[-1:]
            logits = hidden @ self._parameters["head"].T
            self._drawn[key] = (logits / temperature).log_softmax(-1)[0]
        return self._drawn[key]

    def draw(
        self,
        prompt: Sequence[int],
        length: int,
        generator: torch.Generator,
        *,
        advantage: float = 1.0,
        temperature: float = 1.0,
        ordinal: int = 0,
        version: int = 0,
        name: str = "0/0",
    ) -> Sample:
        """Sample a completion, as an engine would."""
        ids, logprobs = list(prompt), [math.nan] * len(prompt)
        for _ in range(length):
            logp = self.distribution(ids, temperature)
            token = int(torch.multinomial(logp.exp(), 1, generator=generator))
            ids.append(token)
            logprobs.append(float(logp[token]))
        given, made = len(prompt), length
        return Sample(
            trajectory_id=name,
            ordinal=ordinal,
            ids=tuple(ids),
            trained=(False,) * given + (True,) * made,
            logprobs=tuple(logprobs),
            versions=(-1,) * given + (version,) * made,
            advantages=(math.nan,) * given + (advantage,) * made,
            temperature=temperature,
        )


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are tiny: waking a second thread costs more than it computes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def make_policy() -> Callable[..., ToyPolicy]:
    return ToyPolicy


@pytest.fixture
def policy() -> ToyPolicy:
    return ToyPolicy()


@pytest.fixture
def draw_step() -> Callable[..., list[Sample]]:
    """draw_step(policy): 4 groups of 3 rows with shared prompts, ragged completions."""

    def draw(
        policy: ToyPolicy, *, seed: int = 0, temperature: float = 1.0, version: int = 0
    ) -> list[Sample]:
        generator = torch.Generator().manual_seed(seed)
        advantages = (1.0, -0.5, -0.5)
        return [
            policy.draw(
                [ordinal, 3, ordinal + 1, 5][: 2 + ordinal % 3],
                1 + (ordinal + 2 * i) % 5,
                generator,
                advantage=advantages[i],
                temperature=temperature,
                ordinal=ordinal,
                version=version,
                name=f"{ordinal}/{i}",
            )
            for ordinal in range(4)
            for i in range(3)
        ]

    return draw

"""Who is decoded next: a first-come queue in front of a batch of rows.

Guarantees: requests enter in the order of their arrival, each with a row and the KV blocks of
its worst case (prompt + max_new_tokens), so an admitted row always runs to its end; a row leaves
the batch with its last token, and its place is filled before the next one is drawn; a request
that can never fit is refused before it waits.

    waiting --admit--> rows --finish--> (caller)
                 leaders: compute their prompt now
                 followers: same group and prompt as a leader of this very step; they share it

Takes: requests. Gives: rows. Pure: no tensors, no clock of its own.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from treadle.errors import ConfigError, SamplerError
from treadle.sampler.engine.blocks import BLOCK, Table, blocks_for
from treadle.sampler.engine.cache import KvCache
from treadle.types import Completion, SamplingParams, StopReason

PREFILL_TOKENS = 2048
"""A step that has this many prompt tokens to compute admits no more: bounds the memory of a step
and how long the running rows wait for it."""


@dataclass(eq=False, slots=True)
class Request:
    """One call of `sample`."""

    session: str
    prompt: tuple[int, ...]
    params: SamplingParams
    deadline: float
    """On the clock of the caller, seconds."""
    future: Future[Completion] = field(default_factory=Future)

    @property
    def tokens(self) -> int:
        """Positions of its worst case."""
        return len(self.prompt) + self.params.max_new_tokens


@dataclass(eq=False, slots=True)
class Row:
    """A request in the batch."""

    request: Request
    table: Table
    epoch: int
    """Of the weights that computed its prompt."""
    ids: list[int]
    """Prompt and drawn tokens; those from `table.length` on have no KV yet."""
    cached: int
    """Prompt tokens whose KV was there already."""
    copies: tuple[tuple[int, int], ...]
    """Blocks to copy before its first write: at once, or once its leader is computed."""
    leader: Row | None = None
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)

    @property
    def drawn(self) -> list[int]:
        return self.ids[len(self.request.prompt) :]

    @property
    def pending(self) -> int:
        """Tokens to compute before the next draw."""
        return len(self.ids) - self.table.length

    def completion(self, reason: StopReason) -> Completion:
        return Completion(
            ids=tuple(self.drawn),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            entropies=tuple(self.entropies),
            stop_reason=reason,
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self.cached,
        )


class Scheduler:
    """The queue and the batch of one engine."""

    def __init__(self, cache: KvCache, *, max_rows: int, max_context: int, vocab: int) -> None:
        self.cache = cache
        self.max_rows = max_rows
        self.max_context = max_context
        self.vocab = vocab
        self.waiting: deque[Request] = deque()
        self.rows: list[Row] = []
        self._busy: set[str] = set()

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Refuse what can never be served.

        Raises:
            ConfigError: a sampling parameter is out of range.
            SamplerError: the prompt is empty, has an unknown id, or cannot fit.
        """
        check_params(params)
        check_ids(prompt, self.vocab)
        tokens = len(prompt) + params.max_new_tokens
        budget = self.cache.pool.num_blocks * BLOCK
        if tokens > self.max_context:
            raise SamplerError(
                f"prompt of {len(prompt)} + max_new_tokens {params.max_new_tokens} = {tokens} "
                f"tokens exceed the context of {self.max_context}",
                hint="shorten the prompt, lower max_new_tokens, or raise model.max_context",
            )
        if blocks_for(tokens) > self.cache.pool.num_blocks:
            raise SamplerError(
                f"prompt of {len(prompt)} + max_new_tokens {params.max_new_tokens} = {tokens} "
                f"tokens exceed the KV budget of {budget}",
                hint="raise the engine's kv_tokens, or lower max_new_tokens",
            )

    def submit(self, request: Request) -> None:
        """Queue a checked request.

        Raises:
            SamplerError: its session is unknown, or is in the middle of a turn.
        """
        if request.session not in self.cache:
            raise SamplerError(
                f"unknown session `{request.session}`", hint="open it first; was it released?"
            )
        if request.session in self._busy:
            raise SamplerError(
                f"session `{request.session}` is in the middle of a turn",
                hint="a session has one turn at a time; open another session for a branch",
            )
        self._busy.add(request.session)
        self.waiting.append(request)

    def admit(self) -> list[Row]:
        """Move requests into the batch, in order, as far as rows, KV and PREFILL_TOKENS reach.

        A follower comes after its leader in the list.
        """
        admitted: list[Row] = []
        leaders: dict[tuple[str, tuple[int, ...]], Row] = {}
        budget = PREFILL_TOKENS
        while self.waiting and len(self.rows) < self.max_rows:
            request = self.waiting[0]
            key = (self.cache.group_of(request.session), request.prompt)
            leader = leaders.get(key) if key[0] else None
            row = self._lead(request) if leader is None else self._follow(request, leader)
            if row is None:
                break
            self.waiting.popleft()
            self.rows.append(row)
            admitted.append(row)
            if leader is None and row.pending > 1:
                leaders[key] = row
                budget -= row.pending
                if budget <= 0:
                    break
        return admitted

    def _lead(self, request: Request) -> Row | None:
        claim = self.cache.claim(request.session, request.prompt, request.tokens)
        if claim is None:
            return None
        return Row(
            request=request,
            table=claim.table,
            epoch=claim.epoch,
            ids=list(request.prompt),
            cached=claim.table.length,
            copies=claim.copies,
        )

    def _follow(self, request: Request, leader: Row) -> Row | None:
        length = len(request.prompt)
        claim = self.cache.claim_beside(request.session, leader.table, length, request.tokens)
        if claim is None:
            return None
        return Row(
            request=request,
            table=claim.table,
            epoch=claim.epoch,
            ids=list(request.prompt),
            cached=length,
            copies=claim.copies,
            leader=leader,
        )

    def finish(self, row: Row, *, keep: bool) -> None:
        """Take a row out of the batch; its KV stays with its session or goes."""
        self.rows.remove(row)
        self._busy.discard(row.request.session)
        if keep:
            self.cache.keep(row.request.session, row.table, row.ids, row.epoch)
        else:
            row.table.clear()

    def withdraw(self, request: Request) -> None:
        """Take a request out of the queue."""
        self.waiting.remove(request)
        self._busy.discard(request.session)
        self.cache.drop(request.session)

    def find(self, session: str) -> Row | Request | None:
        """The session's turn, running or waiting."""
        for row in self.rows:
            if row.request.session == session:
                return row
        return next((r for r in self.waiting if r.session == session), None)


def check_params(params: SamplingParams) -> None:
    """Raises ConfigError naming the parameter, its value and the rule."""
    rules = (
        ("max_new_tokens", int, lambda v: v >= 1, "an integer >= 1"),
        ("temperature", float, lambda v: v >= 0, "a finite number >= 0 (0 = greedy)"),
        ("top_p", float, lambda v: 0 < v <= 1, "in (0, 1] (1 = off)"),
        ("top_k", int, lambda v: v >= 0, "an integer >= 0 (0 = off)"),
        ("seed", int, lambda v: True, "an integer"),
        ("deadline_s", float, lambda v: v > 0, "finite seconds > 0"),
    )
    for name, kind, holds, rule in rules:
        value = getattr(params, name)
        typed = isinstance(value, int | kind) and not isinstance(value, bool)
        if not (typed and (kind is int or math.isfinite(value)) and holds(value)):
            raise ConfigError(f"sampling parameter `{name}` must be {rule}, got {value!r}")
    if isinstance(params.stop, str) or not all(isinstance(s, str) and s for s in params.stop):
        raise ConfigError(
            f"sampling parameter `stop` must be a tuple of non-empty strings, got {params.stop!r}"
        )


def check_ids(ids: Sequence[int], vocab: int) -> None:
    """Raises SamplerError when there is no id, or one that the model has no embedding for."""
    if not ids:
        raise SamplerError("the prompt is empty: a model needs at least one token to continue")
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab:
        bad = low if low < 0 else high
        raise SamplerError(
            f"id {bad} at position {list(ids).index(bad)} of {len(ids)} is not in the "
            f"vocabulary 0..{vocab - 1}",
            hint="was the prompt encoded with another model's tokenizer?",
        )

"""Who is computed next: a first-come queue in front of a batch of turns.

    waiting --admit--> rows --finish--> (caller)
       ^                |
       `--- preempt ----'   blocks are short: the turn that came last waits, with its tokens

Guarantees: turns enter in the order of their arrival, each with the KV blocks of what it has to
compute and one for every running turn left over; a turn whose prompt is being computed by
another right now waits until it can share it; the blocks of a running turn that grows are
found by preempting the latest, which loses no token: it is computed again and goes on, and a
drawn id does not depend on when it was drawn; the oldest turn always runs, so every turn ends. An
open session that is idle is asked for its KV last of all, when a turn is alone and still short.

A step computes at most `prefill_tokens` of prompts, in pieces, so that a long prompt does not
stall the turns that are being decoded.

Takes: turns. Gives: pieces of them. Pure: no tensors, no clock of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from treadle.errors import SamplerError
from treadle.sampler.checks import check_ids, check_params
from treadle.sampler.engine.blocks import BLOCK, Table, blocks_for
from treadle.sampler.engine.cache import Claim, KvCache
from treadle.types import Completion, SamplingParams, StopReason

PREFILL_TOKENS = 1024
"""Prompt tokens of a step, by default: bounds its memory and how long running turns wait."""

Copies = list[tuple[int, int]]


@dataclass(eq=False, slots=True)
class Turn:
    """One call of `sample`, from the queue to its end."""

    session: str
    prompt: tuple[int, ...]
    params: SamplingParams
    deadline: float
    """On the clock of the caller, seconds."""
    adapter: str = ""
    future: Future[Completion] = field(default_factory=Future)
    ids: list[int] = field(default_factory=list)
    """Prompt and drawn tokens; those from `table.length` on have no KV yet."""
    table: Table | None = None
    """None while it waits."""
    epoch: int = 0
    """Of the weights that computed its prompt."""
    cached: int | None = None
    """Prompt tokens whose KV was there when it was first admitted."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ids = list(self.prompt)

    @property
    def drawn(self) -> list[int]:
        return self.ids[len(self.prompt) :]

    @property
    def length(self) -> int:
        """Positions with KV."""
        return 0 if self.table is None else self.table.length

    @property
    def pending(self) -> int:
        """Tokens to compute before the next draw."""
        return len(self.ids) - self.length

    @property
    def blocks(self) -> list[int]:
        assert self.table is not None, "a waiting turn has no blocks"
        return self.table.blocks

    def completion(self, reason: StopReason) -> Completion:
        return Completion(
            ids=tuple(self.drawn),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            entropies=tuple(self.entropies),
            stop_reason=reason,
            prompt_tokens=len(self.prompt),
            cached_tokens=self.cached or 0,
        )


class Scheduler:
    """The queue and the batch of one engine."""

    def __init__(
        self,
        cache: KvCache,
        *,
        max_rows: int,
        max_context: int,
        vocab: int,
        prefill_tokens: int = PREFILL_TOKENS,
    ) -> None:
        self.cache = cache
        self.max_rows = max_rows
        self.max_context = max_context
        self.vocab = vocab
        self.prefill_tokens = prefill_tokens
        self.waiting: deque[Turn] = deque()
        self.rows: list[Turn] = []
        """In the order of their admission."""
        self.preemptions = 0
        self.query_tokens = 0
        """Prompt tokens looked up in the cache."""
        self.hit_tokens = 0
        """Of these, tokens whose KV was there."""
        self._short = False
        self._busy: dict[str, Turn] = {}
        # Waiting turns that could share what a row computes in this step.
        self._sharing: list[Turn] = []

    @property
    def waiting_for_kv(self) -> int:
        """Waiting turns for which the batch has a place but the pool no blocks."""
        return min(len(self.waiting), self.max_rows - len(self.rows)) if self._short else 0

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

    def submit(self, turn: Turn) -> None:
        """Queue a checked turn.

        Raises:
            SamplerError: its session is unknown, or is in the middle of a turn.
        """
        if turn.session not in self.cache:
            raise SamplerError(
                f"unknown session `{turn.session}`",
                hint="open it first; was it released, or left alone for too long?",
            )
        if turn.session in self._busy:
            raise SamplerError(
                f"session `{turn.session}` is in the middle of a turn",
                hint="a session has one turn at a time; open another session for a branch",
            )
        turn.adapter = self.cache.adapter_of(turn.session)
        self._busy[turn.session] = turn
        self.waiting.append(turn)

    def find(self, session: str) -> Turn | None:
        """The session's turn, running or waiting."""
        return self._busy.get(session)

    # ------------------------------------------------------------------ a step

    def grow(self) -> None:
        """Blocks for the next token of every row, the oldest first."""
        for row in list(self.rows):
            tokens = len(row.ids)
            while row.table is not None and row.table.room < tokens:
                if row.table.shortfall(tokens) <= self.cache.pool.free:
                    copies = row.table.reserve(tokens)
                    assert not copies, "a running turn does not own its last block"
                elif len(self.rows) > 1:
                    self.preempt(self.rows[-1])
                    self.preemptions += 1
                else:
                    self.cache.give_up(row.table, tokens)
                    assert row.table.shortfall(tokens) <= self.cache.pool.free, "blocks leaked"

    def admit(self) -> Copies:
        """Move turns into the batch as far as places and KV reach; returns blocks to copy now."""
        copies: Copies = []
        admitted: set[Turn] = set()
        self._short = False
        self._sharing = []
        computing = {_next_block(row, row.length) for row in self.rows if row.pending > 1}
        for turn in self.waiting:
            if len(self.rows) + len(self._sharing) >= self.max_rows:
                break
            known = self.cache.known(turn.session, turn.ids) if computing else 0
            if computing and _next_block(turn, known) in computing:
                self._sharing.append(turn)
                continue
            claim = self._claim(turn)
            if claim is None:
                self._short = True
                break
            admitted.add(turn)
            copies += self._start(turn, claim)
            if turn.pending > 1:
                computing.add(_next_block(turn, turn.length))
        if admitted:
            self.waiting = deque(t for t in self.waiting if t not in admitted)
        return copies

    def _claim(self, turn: Turn) -> Claim | None:
        tokens = min(len(turn.ids) + 1, len(turn.prompt) + turn.params.max_new_tokens)
        alone = not self.rows
        return self.cache.claim(turn.session, turn.ids, tokens, spare=len(self.rows), insist=alone)

    def _start(self, turn: Turn, claim: Claim) -> Copies:
        turn.table, turn.epoch = claim.table, claim.epoch
        self.rows.append(turn)
        if turn.cached is None:
            turn.cached = claim.table.length
            self.query_tokens += len(turn.prompt)
            self.hit_tokens += turn.cached
        return claim.copies

    def pieces(self) -> list[tuple[Turn, int]]:
        """Rows to compute in this step, and how many tokens of each."""
        pieces: list[tuple[Turn, int]] = []
        left = self.prefill_tokens
        for row in self.rows:
            count = row.pending
            if count > 1:
                count = min(count, left)
                left -= count
            if count:
                pieces.append((row, count))
        return pieces

    def join(self, computed: Sequence[Turn]) -> tuple[list[tuple[Turn, Turn]], Copies]:
        """Admit waiting turns whose ids were all computed by another in this very step.

        They draw their next token from its logits. Call it before those rows draw. Rows with KV
        of other weights than those serving lead nobody.

        Returns:
            (turn, the row that computed it), and blocks to copy before either writes on.
        """
        pairs: list[tuple[Turn, Turn]] = []
        copies: Copies = []
        leaders = {
            (row.adapter, tuple(row.ids)): row
            for row in computed
            if row.epoch == self.cache.epoch(row.adapter)
        }
        for turn in self._sharing if leaders else []:
            leader = leaders.get((turn.adapter, tuple(turn.ids)))
            if leader is None or len(self.rows) >= self.max_rows or leader.table is None:
                continue
            claim = self.cache.claim_beside(
                turn.session, leader.table, len(turn.ids) + 1, spare=len(self.rows)
            )
            if claim is None:
                continue
            self.waiting.remove(turn)
            copies += self._start(turn, claim)
            pairs.append((turn, leader))
        self._sharing = []
        return pairs, copies

    # ------------------------------------------------------------------ ends

    def preempt(self, row: Turn) -> None:
        """Back to the head of the queue; what it computed can be found until it is overwritten."""
        assert row.table is not None, "a waiting turn has nothing to give"
        self.rows.remove(row)
        self.cache.keep(row.session, row.table, row.ids, row.epoch, hold=False)
        row.table = None
        self.waiting.appendleft(row)

    def finish(self, turn: Turn, *, keep: bool) -> None:
        """Take a turn out; its KV stays with its session or goes."""
        del self._busy[turn.session]
        if turn.table is None:
            self.waiting.remove(turn)
            return
        self.rows.remove(turn)
        if keep:
            self.cache.keep(turn.session, turn.table, turn.ids, turn.epoch)
        else:
            turn.table.clear()
        turn.table = None


def _next_block(turn: Turn, length: int) -> tuple[str, tuple[int, ...]]:
    """What a turn computes next once `length` positions are there, as far as its next block."""
    return turn.adapter, tuple(turn.ids[: length // BLOCK * BLOCK + BLOCK])

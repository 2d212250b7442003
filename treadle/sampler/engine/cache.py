"""Whose KV is whose: sessions own what they computed, everything computed can be found again.

    session   holds the KV of its last turn until `close`; nobody can take it, unless nothing
              could run otherwise (`give_up`)
    tree      finds the KV of any prompt that begins alike, whoever computed it: an earlier turn,
              a sibling, another group, a session that was closed (prefix.py)

Guarantees: KV is reused under the weights that made it and under no others (`invalidate` starts
a new epoch: what is idle is dropped at once, what is in use is dropped when its turn ends);
closing a session makes every block that it alone held free at once, where it can be found until
it is needed; KV that is in use is never given up.

Takes: prompts. Gives: tables with the reusable part filled (see blocks.py). Pure: no tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from treadle.sampler.engine.blocks import Table
from treadle.sampler.engine.prefix import PrefixTree


@dataclass(slots=True)
class _Session:
    adapter: str
    table: Table | None = None
    """KV that no turn is using now."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A table with writable room."""

    table: Table
    """`table.length` leading positions hold KV."""
    copies: list[tuple[int, int]]
    """Blocks to copy before the first write."""
    epoch: int


class KvCache:
    """Bookkeeping of one engine's KV."""

    def __init__(self, num_blocks: int) -> None:
        self._tree = PrefixTree(num_blocks)
        self.pool = self._tree.pool
        self.dropped_tokens = 0
        """Positions of open sessions' KV given up because nothing could run otherwise."""
        self._epochs: Counter[str] = Counter()
        self._sessions: dict[str, _Session] = {}
        # Sessions with idle KV, the longest idle first.
        self._idle: dict[str, None] = {}

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def adapter_of(self, session: str) -> str:
        return self._sessions[session].adapter

    def sessions_of(self, adapter: str) -> list[str]:
        """Open sessions that use an adapter."""
        return [name for name, held in self._sessions.items() if held.adapter == adapter]

    def epoch(self, adapter: str) -> int:
        """Of the weights now serving under a name; grows with each `invalidate`."""
        return self._epochs[adapter]

    def __contains__(self, session: str) -> bool:
        return session in self._sessions

    # ------------------------------------------------------------------ sessions

    def open(self, session: str, adapter: str = "") -> None:
        self._sessions[session] = _Session(adapter)

    def close(self, session: str) -> None:
        """Forget a session and free its KV. Unknown sessions are ignored."""
        self.drop(session)
        self._sessions.pop(session, None)

    def close_all(self) -> None:
        for session in list(self._sessions):
            self.close(session)

    def drop(self, session: str) -> int:
        """Free a session's idle KV; returns the number of positions."""
        self._idle.pop(session, None)
        held = self._sessions.get(session)
        if held is None or held.table is None:
            return 0
        positions = held.table.length
        held.table.clear()
        held.table = None
        return positions

    # ------------------------------------------------------------------ turns

    def known(self, session: str, ids: Sequence[int]) -> int:
        """Leading positions that `claim` would find: never all, the last is needed for its
        logits."""
        return self._tree.length(self._key(self.adapter_of(session)), ids, len(ids) - 1)

    def claim(
        self,
        session: str,
        ids: Sequence[int],
        tokens: int,
        *,
        spare: int = 0,
        insist: bool = False,
    ) -> Claim | None:
        """A table with room for `tokens` positions that leaves `spare` blocks free.

        Reuses the longest known prefix. Returns None when free blocks are short; what the
        session can reuse stays its own until it asks again.

        Args:
            insist: nobody runs who could give blocks back: take those of idle sessions.
        """
        adapter = self.adapter_of(session)
        table = self._tree.match(self._key(adapter), ids, len(ids) - 1)
        claim = self._claim(session, table, tokens, spare)
        if claim is None and insist:
            self._idle.pop(session)
            self._sessions[session].table = None
            self.give_up(table, tokens)
            if table.shortfall(tokens) > self.pool.free:
                # The copy of a block does not fit beside the block: do without what is shared.
                table.clear()
            claim = self._claim(session, table, tokens, 0)
        return claim

    def claim_beside(self, session: str, other: Table, tokens: int, *, spare: int) -> Claim | None:
        """As `claim`, sharing all that `other` has computed, its last position included."""
        return self._claim(session, other.fork(other.length), tokens, spare)

    def _claim(self, session: str, table: Table, tokens: int, spare: int) -> Claim | None:
        self.drop(session)
        if table.shortfall(tokens) + spare > self.pool.free:
            self._hold(session, table)
            return None
        return Claim(table, table.reserve(tokens), self.epoch(self.adapter_of(session)))

    def remember(self, session: str, table: Table, ids: Sequence[int], epoch: int) -> None:
        """Let what a running turn has computed be found."""
        adapter = self.adapter_of(session)
        if epoch == self._epochs[adapter]:
            self._tree.insert(self._key(adapter), table, ids, ended=False)

    def keep(
        self, session: str, table: Table, ids: Sequence[int], epoch: int, *, hold: bool = True
    ) -> None:
        """A turn ended. Its KV is findable, and with `hold` stays the session's own.

        KV of other weights than those serving is dropped. `ids` cover the table.
        """
        adapter = self.adapter_of(session)
        table.truncate(table.length)
        if epoch == self._epochs[adapter]:
            self._tree.insert(self._key(adapter), table, ids, ended=True)
            if hold:
                self._hold(session, table)
                return
        table.clear()

    def _hold(self, session: str, table: Table) -> None:
        self._sessions[session].table = table
        self._idle[session] = None

    def _key(self, adapter: str) -> Hashable:
        return adapter, self._epochs[adapter]

    # ------------------------------------------------------------------ loss

    def invalidate(self, adapter: str | None = None) -> None:
        """Other weights serve under a name, or under all: no KV of before is ever reused."""
        names = set(self._epochs) | {held.adapter for held in self._sessions.values()} | {""}
        for name in names if adapter is None else [adapter]:
            for session in [s for s in self._idle if self.adapter_of(s) == name]:
                self.drop(session)
            self._tree.drop(self._key(name))
            self._epochs[name] += 1

    def give_up(self, table: Table, tokens: int) -> None:
        """Free the KV of idle open sessions, longest idle first, until a table can grow.

        The last resort: its owners may have to compute it again.
        """
        for session in list(self._idle):
            if table.shortfall(tokens) <= self.pool.free:
                return
            self.dropped_tokens += self.drop(session)

    def clear(self) -> None:
        """Free all idle KV, and find nothing of it again."""
        for session in list(self._idle):
            self.drop(session)
        self._tree.clear()

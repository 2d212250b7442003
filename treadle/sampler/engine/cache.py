"""Which sequence may reuse whose KV: sessions, groups, and what to give up when blocks are short.

    session   keeps the KV of its last turn until `close`, so that a later turn which continues
              the same ids computes only what is new
    group     keeps the KV of its first prompt while one of its sessions is open, so that the
              siblings compute nothing of it again

Guarantees: KV is reused under the weights that made it and under no others (`invalidate` starts
a new epoch: what is idle is dropped at once, what is in use is dropped when its turn ends);
closing a session gives every block back; KV that is in use is never given up.

Takes: prompts. Gives: tables with the reusable part filled (see blocks.py). Pure: no tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from treadle.sampler.engine.blocks import BLOCK, BlockPool, Table


@dataclass(slots=True)
class _Kept:
    """KV that nobody is using now."""

    table: Table
    ids: tuple[int, ...]
    """What the table's positions were computed from; as long as the table."""


@dataclass(slots=True)
class _Session:
    group: str
    kept: _Kept | None = None


@dataclass(slots=True)
class _Group:
    members: set[str] = field(default_factory=set)
    kept: _Kept | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """A table with writable room for a whole turn."""

    table: Table
    """`table.length` leading positions of the prompt hold KV."""
    copies: tuple[tuple[int, int], ...]
    """Blocks to copy before the first write."""
    epoch: int


class KvCache:
    """Bookkeeping of one engine's KV."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.epoch = 0
        self.dropped_tokens = 0
        """Positions of idle KV given up because blocks were short; they may be computed again."""
        self._sessions: dict[str, _Session] = {}
        self._groups: dict[str, _Group] = {}
        # Sessions with idle KV, the longest idle first.
        self._idle: dict[str, None] = {}

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    def group_of(self, session: str) -> str:
        return self._sessions[session].group

    def __contains__(self, session: str) -> bool:
        return session in self._sessions

    # ------------------------------------------------------------------ sessions

    def open(self, session: str, group: str) -> None:
        self._sessions[session] = _Session(group)
        if group:
            self._groups.setdefault(group, _Group()).members.add(session)

    def close(self, session: str) -> None:
        """Forget a session and free its KV. Unknown sessions are ignored."""
        self.drop(session)
        closed = self._sessions.pop(session, None)
        if closed is None or not closed.group:
            return
        group = self._groups[closed.group]
        group.members.discard(session)
        if not group.members:
            if group.kept is not None:
                group.kept.table.clear()
            del self._groups[closed.group]

    def close_all(self) -> None:
        for session in list(self._sessions):
            self.close(session)

    def drop(self, session: str) -> int:
        """Give up a session's idle KV; returns the number of positions."""
        self._idle.pop(session, None)
        held = self._sessions.get(session)
        if held is None or held.kept is None:
            return 0
        positions = held.kept.table.length
        held.kept.table.clear()
        held.kept = None
        return positions

    # ------------------------------------------------------------------ turns

    def claim(self, session: str, prompt: Sequence[int], tokens: int) -> Claim | None:
        """Room for a turn that ends at `tokens` positions, prompt included.

        Reuses the longest known prefix, but never the whole prompt: its last token must be
        computed for its logits. Returns None when blocks are short even without the idle KV of
        others; what the session can reuse stays its own until it asks again.
        """
        held = self._sessions[session]
        own = _common(held.kept, prompt)
        group = self._groups[held.group].kept if held.group else None
        shared = _common(group, prompt)
        if held.kept is not None and own >= shared:
            table = held.kept.table
            table.truncate(own)
            held.kept = None
        else:
            self.drop(session)
            table = Table(self.pool) if group is None else group.table.fork(shared)
        self._idle.pop(session, None)
        if not self._make_room(table, tokens):
            self.keep(session, table, prompt, self.epoch)
            return None
        return Claim(table=table, copies=tuple(table.reserve(tokens)), epoch=self.epoch)

    def claim_beside(self, session: str, leader: Table, length: int, tokens: int) -> Claim | None:
        """As `claim`, sharing the first `length` positions that `leader` is about to fill.

        The copies are to be made when they are filled, before either of the two writes on.
        """
        self.drop(session)
        table = leader.fork(length)
        if not self._make_room(table, tokens):
            table.clear()
            return None
        return Claim(table=table, copies=tuple(table.reserve(tokens)), epoch=self.epoch)

    def keep(self, session: str, table: Table, ids: Sequence[int], epoch: int) -> None:
        """A turn ended: its KV is idle, for the session's next turn. `ids` cover the table."""
        table.truncate(table.length)
        if epoch != self.epoch or session not in self._sessions or table.length == 0:
            table.clear()
            return
        self._sessions[session].kept = _Kept(table, tuple(ids[: table.length]))
        self._idle[session] = None

    def remember(self, session: str, table: Table, prompt: Sequence[int]) -> list[tuple[int, int]]:
        """Keep a computed prompt for the siblings of `session`; returns blocks to copy now.

        A group that remembers a prompt already, or a session without one, changes nothing.
        Without a free block for a partial last block, only the full ones are kept.
        """
        name = self._sessions[session].group
        if not name or self._groups[name].kept is not None:
            return []
        kept = table.fork(len(prompt))
        copies: list[tuple[int, int]] = []
        if len(prompt) % BLOCK:
            # A private last block: the turn goes on writing in the original.
            if kept.shortfall(len(prompt) + 1) <= self.pool.free:
                copies = kept.reserve(len(prompt) + 1)
            else:
                kept.truncate(len(prompt) // BLOCK * BLOCK)
        if kept.length:
            self._groups[name].kept = _Kept(kept, tuple(prompt[: kept.length]))
        return copies

    def invalidate(self) -> None:
        """New weights: no KV of before is ever reused."""
        self.epoch += 1
        for session in list(self._idle):
            self.drop(session)
        for group in self._groups.values():
            if group.kept is not None:
                group.kept.table.clear()
                group.kept = None

    # ------------------------------------------------------------------ shortage

    def _make_room(self, table: Table, tokens: int) -> bool:
        """Give up idle KV, longest idle first, until the table can grow; False = not enough.

        Nothing is given up when giving up everything would not be enough.
        """
        if table.shortfall(tokens) <= self.pool.free:
            return True
        idle = Counter(block for held in self._idle_tables() for block in held.blocks)
        reclaimable = sum(count == self.pool.holders(block) for block, count in idle.items())
        if table.shortfall(tokens, letting_go=idle) > self.pool.free + reclaimable:
            return False
        for session in list(self._idle):
            self.dropped_tokens += self.drop(session)
            if table.shortfall(tokens) <= self.pool.free:
                return True
        for group in self._groups.values():
            if group.kept is not None:
                self.dropped_tokens += group.kept.table.length
                group.kept.table.clear()
                group.kept = None
                if table.shortfall(tokens) <= self.pool.free:
                    return True
        return False

    def _idle_tables(self) -> Iterator[Table]:
        for session in self._idle:
            kept = self._sessions[session].kept
            assert kept is not None, f"session {session} is listed as idle without KV"
            yield kept.table
        for group in self._groups.values():
            if group.kept is not None:
                yield group.kept.table


def _common(kept: _Kept | None, prompt: Sequence[int]) -> int:
    """Leading positions that can be reused for a prompt; at most all but its last token."""
    if kept is None:
        return 0
    limit = min(len(kept.ids), len(prompt) - 1)
    same = tuple(prompt[:limit])
    if kept.ids[:limit] == same:
        return limit
    return next(i for i in range(limit) if kept.ids[i] != same[i])

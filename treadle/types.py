"""The nouns that cross a stage. Frozen, plain Python, no torch: imports in about 0.1 s.

Guarantees that hold for every value built here:
- ids, masks, logprobs and versions of a node have one length; a sampled token is marked `trained`
  only if a sampler returned its id *and* its logprob (contract 1: token truth); a demonstrated one
  has neither logprob nor version, and an observed one is never trained;
- untrained positions carry NaN as logprob and -1 as version (contract 2: masked means absent).

Takes: nothing. Gives: the vocabulary of docs/glossary.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from treadle.errors import ContractError, ErrorRecord

# --------------------------------------------------------------------------- messages and tasks


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A call as the model wrote it. `arguments` is JSON text, kept even when malformed."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One chat message."""

    role: str
    """system | user | assistant | tool"""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """For role "tool": the call that this message answers."""
    name: str = ""
    reasoning: str = ""
    """Thinking text of an assistant turn, without its tags."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Where something came from and under which terms (contract 12)."""

    source: str
    license: str
    sha256: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One problem."""

    id: str
    """Stable and unique in its task set: equal ids mean equal text."""
    taskset: str
    messages: tuple[Message, ...]
    """What the model is shown first."""
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """For the grader alone; never rendered."""
    split: str = "train"
    date: str | None = None
    """ISO date when the task's content became public, if known."""


class Party(StrEnum):
    """Who produced a node."""

    POLICY = "policy"
    FROZEN = "frozen"
    USER = "user"
    AGENT = "agent"
    ENVIRONMENT = "environment"


class Source(StrEnum):
    """How the tokens of a node came to be. Contract 1 binds SAMPLED."""

    SAMPLED = "sampled"
    DEMONSTRATION = "demonstration"
    OBSERVATION = "observation"


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What an environment answers."""

    messages: tuple[Message, ...] = ()
    done: bool = False
    reward: float | None = None
    """Reward of this step in the environment's own units; None = nothing said."""


@runtime_checkable
class Environment(Protocol):
    """The stateful thing a task may bring; one instance per trajectory."""

    def reset(self, task: Task, seed: int) -> Observation: ...

    def step(self, message: Message) -> Observation: ...

    def close(self) -> None: ...


@runtime_checkable
class Taskset(Protocol):
    """An ordered, seekable source: `task(i)` is a pure function of (seed, split, i)."""

    @property
    def name(self) -> str: ...

    @property
    def provenance(self) -> Provenance: ...

    def size(self, split: str) -> int | None:
        """Number of distinct tasks of the split; None = unbounded."""
        ...

    def task(self, index: int, split: str = "train") -> Task:
        """Raises IndexError at or past `size(split)`; the caller wraps around by epoch."""
        ...

    def grade(self, task: Task, answer: str) -> Mapping[str, float]:
        """Named scores in [0, 1] of a final answer. Must hold "score" (the strict rate).

        "lenient" is present where a looser reading exists.
        """
        ...

    def gold(self, task: Task) -> str | None:
        """An answer that must score 1.0, or None when the set has none."""
        ...


# --------------------------------------------------------------------------- sampling


class StopReason(StrEnum):
    """Why a turn ended; finished / truncated / aborted follows from this alone."""

    EOS = "eos"
    """The model emitted one of its stop ids."""
    STOP_STRING = "stop_string"
    LENGTH = "length"
    """max_new_tokens or the context was used up: the turn is truncated."""
    ABORTED = "aborted"
    """Cancelled, past its deadline or lost; never an answer."""


MIN_TEMPERATURE = 1e-6
"""Above 0; logits divided by less need not be finite in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Everything that shapes a turn; recorded with the trajectory."""

    max_new_tokens: int
    temperature: float = 1.0
    """>= MIN_TEMPERATURE for trained rollouts; 0 = greedy, for evals only."""
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    stop: tuple[str, ...] = ()
    """Stop strings; the tokens that completed one are kept, nothing is appended."""
    seed: int = 0
    """The draw is a function of (seed, position) and of the distribution, not of the batch."""
    deadline_s: float = 600.0
    """Wall clock for the call, queueing included; then the turn is ABORTED."""
    experts: str = ""
    """Of a mixture of experts, return the choices of its routers: "full" = of every position,
    "delta" = of those that this session's turns have not returned yet; "" = nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertChoices:
    """The experts that computed a range of positions of one sequence."""

    first: int
    """Position of the first token."""
    layers: int
    """Layers that have experts."""
    top_k: int
    """Experts per token."""
    data: bytes
    """uint16, little-endian, [positions, layers, top_k]."""

    @property
    def num_positions(self) -> int:
        return len(self.data) // (2 * self.layers * self.top_k)


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What a sampler returns for one turn. The four tuples have one length."""

    ids: tuple[int, ...]
    """Sampled ids, the stop id included when the model emitted it."""
    logprobs: tuple[float, ...]
    """log mu(id) in nats, fp32, at the sampling temperature, over the full vocabulary."""
    versions: tuple[int, ...]
    """Policy version that sampled each token."""
    entropies: tuple[float, ...] = ()
    """Entropy of each distribution in nats where the engine reports it; else empty."""
    stop_reason: StopReason
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV was reused."""
    experts: ExpertChoices | None = None
    """As `SamplingParams.experts` asked, up to the token before the last: that one was drawn but
    never computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Teacher-forced log-probabilities; all tuples have one entry per scored position."""

    logprobs: tuple[float, ...]
    """Of the given ids, in nats."""
    top_ids: tuple[tuple[int, ...], ...]
    """The most probable ids of each position, best first; ties in id order."""
    top_logprobs: tuple[tuple[float, ...], ...]
    """Theirs."""
    label_logprobs: tuple[tuple[float, ...], ...]
    """Of the labels that were asked for, in their order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerCapabilities:
    """What a backend really does (contract 10): a lack is reported, never faked."""

    release: bool
    """`release` frees the session's KV at once."""
    score: bool
    shared_prefix: bool
    entropies: bool
    pause: bool = False
    """`pause` and `resume`: it can stand still with its sessions open."""
    experts: bool = False
    """It returns the choices of the model's routers."""
    adapters: bool = False
    """It serves named adapters beside the served weights."""
    offload: bool = False
    """It can give the memory of its KV back while it stands still."""


@runtime_checkable
class Sampler(Protocol):
    """An engine, local or remote. Sessions are the unit of KV ownership."""

    @property
    def version(self) -> int:
        """PolicyVersion now serving."""
        ...

    @property
    def capabilities(self) -> SamplerCapabilities: ...

    async def open(self, session: str, *, group: str = "") -> None:
        """Start a session. Sessions of one `group` are expected to share their first prompt."""
        ...

    async def sample(
        self, session: str, prompt: Sequence[int], params: SamplingParams
    ) -> Completion:
        """Continue `prompt` (full ids; the engine reuses the KV of any prefix it still holds).

        Raises SamplerError: unknown session, prompt too long, engine dead.
        """
        ...

    async def score(
        self, ids: Sequence[int], start: int, *, temperature: float = 1.0
    ) -> tuple[float, ...]:
        """log pi(ids[t] | ids[:t]) for t in start..len(ids)-1; start >= 1."""
        ...

    async def release(self, session: str) -> None:
        """End a session and free its KV. Idempotent."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerLoad:
    """How busy a replica is at one instant; counters run from its start."""

    running: int
    """Turns in the batch."""
    waiting: int
    """Turns in the queue."""
    waiting_for_kv: int
    """Of these, turns that wait for KV room and not for a place in the batch."""
    sessions: int
    """Open sessions."""
    kv_usage: float
    """Fraction of the KV that is held, 0..1."""
    kv_tokens: int
    """KV capacity in tokens."""
    preemptions: int
    """Turns whose KV was taken away while they ran; they lose no token."""
    prefix_query_tokens: int
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_hit_tokens: int
    """Of these, tokens whose KV was there."""


@runtime_checkable
class Replica(Sampler, Protocol):
    """A sampler that says how busy it is: what a router routes by."""

    async def load(self) -> SamplerLoad:
        """Raises SamplerError when the replica does not answer: it is not healthy."""
        ...


class WeightSink(Protocol):
    """Something that serves weights and can be moved to a newer version."""

    def publish(self, version: int) -> None:
        """Serve the current weights as `version`; atomic; raises WeightsError and keeps the old."""
        ...


# --------------------------------------------------------------------------- trajectories


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One vertex of a trajectory: only the tokens that it added to its parent."""

    id: int
    parent: int | None
    """None for a root; else the id of an earlier node."""
    party: Party
    source: Source
    ids: tuple[int, ...]
    trained: tuple[bool, ...]
    logprobs: tuple[float, ...]
    """Behaviour logprobs in nats; NaN where not sampled."""
    versions: tuple[int, ...]
    """Policy version per token; -1 where not sampled."""
    message: Message | None = None
    """What the tokens say, for people and graders; training never reads it."""
    stop_reason: StopReason | None = None
    entropies: tuple[float, ...] = ()
    agent: tuple[int, ...] = ()
    """Whose turn or prompt it is: () the root agent's, (0,) its first sub-agent's, (0, 2) that
    one's third sub-agent's. Branches of one agent (compaction, forks) share it."""

    def __post_init__(self) -> None:
        lengths = {len(self.ids), len(self.trained), len(self.logprobs), len(self.versions)}
        if len(lengths) != 1:
            raise ContractError(
                f"node {self.id}: ids, trained, logprobs and versions differ in length: {lengths}"
            )
        if any(self.trained) and self.source is Source.OBSERVATION:
            raise ContractError(f"node {self.id}: a {self.source} token is marked as trained")
        if self.source is Source.DEMONSTRATION:
            if any(v >= 0 for v in self.versions) or any(x == x for x in self.logprobs):
                raise ContractError(
                    f"node {self.id}: a demonstration has a behaviour logprob or a policy version, "
                    "but nothing sampled it"
                )
            return
        for i, (trained, logprob) in enumerate(zip(self.trained, self.logprobs, strict=True)):
            if trained and not math.isfinite(logprob):
                raise ContractError(
                    f"node {self.id}: trained token {i} of {len(self.ids)} has no behaviour "
                    f"logprob (got {logprob})",
                    hint="the engine must return one per sampled token",
                )


class Status(StrEnum):
    """How a trajectory ended. Derived from stop reasons and typed errors, never from text."""

    FINISHED = "finished"
    TRUNCATED = "truncated"
    """A token, turn or context limit cut it; graded as it stands, counted apart."""
    ABORTED = "aborted"
    """Cancelled or past its time; never graded, never trained."""
    FAILED = "failed"
    """A boundary raised; never graded, never trained."""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens start..end-1 of one node."""

    node: int
    start: int
    end: int


OVERLONG = "overlong"
"""The part of a reward that holds what `rollout.overlong` adds to its value: 0 or less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    """A judged trajectory. `value is None` = unscored, which is not 0."""

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Named components and metrics ("score", "lenient", ...), each finite."""
    flagged: tuple[TokenSpan, ...] = ()
    """What a reviewer marked as bad, inside of the trajectory's nodes; learn.credit.span_blame."""
    error: ErrorRecord | None = None
    """Why it is unscored."""

    @property
    def earned(self) -> float | None:
        """The value before what `rollout.overlong` took off."""
        taken = self.parts.get(OVERLONG, 0.0)
        if self.value is None or not taken:
            return self.value
        return round(self.value - taken, 9)  # the sum was rounded: 1 must be 1 again

    @property
    def solved(self) -> bool:
        """A full strict score: the part `score`, else what was earned, >= 1."""
        score = self.parts.get("score", self.earned)
        return score is not None and score >= 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """What one rollout did: a graph of nodes whose leaves are branches."""

    id: str
    """"{ordinal}/{sample}", unique in a run."""
    task: Task
    sample: int
    """Index in its group, from 0."""
    nodes: tuple[Node, ...]
    status: Status
    sampling: SamplingParams
    reward: Reward = field(default_factory=lambda: Reward(value=None))
    error: ErrorRecord | None = None
    duration_s: float = 0.0
    tool_calls: int = 0
    tool_errors: int = 0
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the harness wants to keep; JSON values."""

    @property
    def answer(self) -> str:
        """Text of the last assistant message that the policy wrote; "" when there is none."""
        for node in reversed(self.nodes):
            if node.party is Party.POLICY and node.message is not None:
                return node.message.content
        return ""

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages in order of creation, branches interleaved."""
        return tuple(n.message for n in self.nodes if n.message is not None)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(n.ids) for n in self.nodes if n.source is Source.SAMPLED)

    @property
    def num_trained_tokens(self) -> int:
        return sum(sum(n.trained) for n in self.nodes)

    def branches(self) -> Iterator[tuple[Node, ...]]:
        """Paths root..leaf, one per leaf, in order of their leaves."""
        by_id = {n.id: n for n in self.nodes}
        parents = {n.parent for n in self.nodes}
        for leaf in self.nodes:
            if leaf.id in parents:
                continue
            path, node = [leaf], leaf
            while node.parent is not None:
                node = by_id[node.parent]
                path.append(node)
            yield tuple(reversed(path))


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The trajectories of one task that are compared."""

    ordinal: int
    """Position of the prompt in the run's task stream: the ledger's key, never reused."""
    task: Task
    trajectories: tuple[Trajectory, ...]
    version: int
    """Oldest policy version of any sampled token; the version at start when there is none."""

    @property
    def scored(self) -> tuple[Trajectory, ...]:
        """Those that count in statistics and are trained: finished or truncated, judged, and with
        at least one trained token."""
        return tuple(
            t
            for t in self.trajectories
            if t.status in (Status.FINISHED, Status.TRUNCATED)
            and t.reward.value is not None
            and t.num_trained_tokens > 0
        )

    @property
    def demonstrated(self) -> bool:
        """It was made from a demonstration: nothing was sampled and nothing is judged."""
        sources = {n.source for t in self.trajectories for n in t.nodes}
        return Source.DEMONSTRATION in sources


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One trainable token row: one branch of one trajectory, with its advantages."""

    trajectory_id: str
    ordinal: int
    """Of its group."""
    ids: tuple[int, ...]
    trained: tuple[bool, ...]
    """trained[t]: ids[t] was sampled or demonstrated here and is to be learnt; trained[0] is
    False."""
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    advantages: tuple[float, ...]
    """A per token, in reward units (or what the estimator says); NaN where untrained. One number
    for all of a trajectory's tokens, unless the estimator gives credit by turn or by token."""
    temperature: float
    """At which ids were sampled; the trainer scores at the same."""
    taskset: str = ""
    """Of its task: names the algorithm that trains the row. "" = the run's."""
    prox_logprobs: tuple[float, ...] = ()
    """The trainer's own log-probabilities, in nats, by the weights that sampled each token; NaN
    where untrained or not measured. () = not measured at all."""
    overtaken: tuple[bool, ...] = ()
    """overtaken[t]: new weights were published between the start of the turn and ids[t], so that
    its prefix is of older weights than the token: no one version reproduces its probability.
    False where untrained. () = no token was."""


# --------------------------------------------------------------------------- layouts


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens in a packed vector."""

    start: int
    """Index of its first token in the packed vector."""
    length: int
    parent: int | None
    """Index of the segment that it continues; None for a root."""
    position: int
    """Position id of its first token (= total length of its ancestors)."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A forest of segments packed into one vector of tokens, shared prefixes stored once.

    A token attends to all tokens of its ancestors' segments and causally to its own. Two rows
    that share a prompt are three segments: the prompt (parent None) and two children.
    Parents precede their children.
    """

    segments: tuple[Segment, ...]

    @property
    def num_tokens(self) -> int:
        return sum(s.length for s in self.segments)

    def ancestors(self, index: int) -> tuple[int, ...]:
        """Segment indices from the root to the parent of `index`."""
        path: list[int] = []
        parent = self.segments[index].parent
        while parent is not None:
            path.append(parent)
            parent = self.segments[parent].parent
        return tuple(reversed(path))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What planners need to know of a model; counts, no tensors."""

    family: str
    """`model_type` of its config, e.g. "llama"."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    parameters: int
    """All, a tied head counted once."""
    max_context: int

"""From a server's answer to tokens that can be trained on, or to an error that says why not.

Guarantees (contracts 1, 10): ids and logprobs are the server's, one logprob per id, each finite;
the server continued the very prompt; a turn that ended by an id ends with that id; every token has
the version of the weights that drew it. Nothing is repaired, rounded or read out of text.

Takes: a `Drawn`. Gives: a Completion, or SamplerError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from treadle.errors import SamplerError
from treadle.sampler.checks import LOGPROB_SLACK
from treadle.types import Completion, StopReason

MISSING_NATS = -9999.0
"""What servers send for a logprob that they do not have."""
MALFORMED = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError)
"""What reading an answer of another form than expected raises."""


# --------------------------------------------------------------------------- reading


def whole(value: object) -> int:
    """A JSON integer. Raises TypeError: it is a fraction, a truth value, text, ..."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected a whole number, got {value!r}")
    return value


def number(value: object) -> float:
    """A JSON number. Raises TypeError, or OverflowError when no float can hold it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"expected a number, got {value!r}")
    return float(value)


def stop_of(value: object) -> int | str | None:
    """An id, a string or null. Raises TypeError."""
    return value if value is None or isinstance(value, str) else whole(value)


# --------------------------------------------------------------------------- checking


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """An answer in the server's own terms."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str
    stop: int | str | None
    """The id or string that ended the turn, where the server says so."""
    prompt_tokens: int
    cached_tokens: int
    spans: tuple[tuple[str, int, int], ...] | None
    """(label of the weights, first token, end); None = the server does not say."""


def completion_of(
    drawn: Drawn,
    prompt: tuple[int, ...],
    room: int,
    *,
    version: int,
    labels: Mapping[str, int] | None,
    stop_ids: Sequence[int] | None,
    vocab: int | None,
    name: str,
) -> Completion:
    """The answer, or SamplerError when it is not token truth.

    Args:
        room: tokens that were allowed.
        version: of the weights that were asked.
        labels: the server's names of weights -> versions, where it says which weights drew which
            token; None = `version` drew all.
        stop_ids: that may have ended it; None = the server's own.
        vocab: ids that the model has; None = not known here.
        name: of the server, in messages.
    """
    n = len(drawn.ids)
    if len(drawn.logprobs) != n:
        raise SamplerError(
            f"{name} returned {n} ids but {len(drawn.logprobs)} logprobs",
            hint="one per sampled token is needed, the stop id included",
        )
    if n > room:
        raise SamplerError(f"{name} returned {n} tokens, {room} were allowed")
    for i, token in enumerate(drawn.ids):
        if token < 0 or (vocab is not None and token >= vocab):
            raise SamplerError(
                f"{name}: token {i} of {n} has id {token}, the vocabulary "
                + ("begins at 0" if vocab is None else f"is 0..{vocab - 1}"),
                hint="does the server serve another model?",
            )
    for i, logprob in enumerate(drawn.logprobs):
        if not MISSING_NATS < logprob <= LOGPROB_SLACK:
            raise SamplerError(
                f"{name}: token {i} of {n} has logprob {logprob}",
                hint="a token without a behaviour logprob cannot be trained on",
            )
    if drawn.prompt_tokens != len(prompt):
        raise SamplerError(
            f"{name} continued {drawn.prompt_tokens} tokens, the prompt has {len(prompt)}",
            hint="the server changed the prompt: tokens drawn from it are of another context",
        )
    if not 0 <= drawn.cached_tokens <= len(prompt):
        raise SamplerError(
            f"{name} found {drawn.cached_tokens} tokens in its cache, the prompt has {len(prompt)}"
        )
    reason = _reason(drawn, stop_ids, name)
    if labels is None or drawn.spans is None:
        versions = (version,) * n
    else:
        versions = versions_of(drawn.spans, n, labels, name)
    return Completion(
        ids=drawn.ids,
        logprobs=tuple(min(0.0, x) for x in drawn.logprobs),
        versions=versions,
        stop_reason=reason,
        prompt_tokens=len(prompt),
        cached_tokens=drawn.cached_tokens,
    )


def _reason(drawn: Drawn, stop_ids: Sequence[int] | None, name: str) -> StopReason:
    if drawn.finish == "length":
        return StopReason.LENGTH
    if drawn.finish == "abort":
        return StopReason.ABORTED
    if drawn.finish != "stop":
        raise SamplerError(f"{name} ended a turn for an unknown reason {drawn.finish!r}")
    if isinstance(drawn.stop, str):
        return StopReason.STOP_STRING
    ended = drawn.ids[-1] if drawn.ids else None
    wanted = stop_ids if drawn.stop is None else (drawn.stop,)
    if ended is None or (wanted and ended not in wanted):
        raise SamplerError(
            f"{name} stopped at {drawn.stop} but the last of {len(drawn.ids)} ids is {ended}",
            hint="the server must return the stop id: without it the end is never learnt",
        )
    return StopReason.EOS


def scores_of(
    found: Sequence[float | None], ids: Sequence[int], start: int, name: str
) -> tuple[float, ...]:
    """Logprobs from `start` on, of as many as there are ids, or SamplerError."""
    if len(found) != len(ids):
        raise SamplerError(f"{name} scored {len(found)} of {len(ids)} ids")
    scores: list[float] = []
    for i, value in enumerate(found[start:], start):
        if value is None or not MISSING_NATS < value <= LOGPROB_SLACK:
            raise SamplerError(
                f"{name} gave {value} as the logprob of id {i} of {len(ids)}",
                hint="expected a finite number <= 0",
            )
        scores.append(min(0.0, value))
    return tuple(scores)


def versions_of(
    spans: Sequence[tuple[str, int, int]], count: int, labels: Mapping[str, int], name: str
) -> tuple[int, ...]:
    """The version of each token from the server's spans, which must cover them all in order."""
    versions: list[int] = []
    for label, start, end in spans:
        if label not in labels:
            raise SamplerError(
                f"{name} drew tokens from weights named {label!r}; known are {sorted(labels)}",
                hint="does another program publish to this server?",
            )
        if start != len(versions) or end < start:
            raise SamplerError(f"{name} gave version spans with a gap at token {len(versions)}")
        versions += [labels[label]] * (end - start)
    if len(versions) != count:
        raise SamplerError(f"{name} gave versions for {len(versions)} of {count} tokens")
    return tuple(versions)

"""From our errors to what a client is told.

Guarantees: every error of the tree has a status and a code; one that another try may mend says
when.

Takes: a TreadleError. Gives: a RequestError.
"""

from __future__ import annotations

from treadle.errors import ConfigError, DataError, LimitExceeded, TreadleError
from treadle.gateway.recorder import ContextExceeded
from treadle.gateway.wire import RequestError
from treadle.sampler.router import NoPlace, NoReplica, SessionExpired, SessionUnknown, TurnLost

SAMPLER_ERRORS: dict[type, tuple[int, str, int]] = {
    NoReplica: (503, "no_replica", 5),
    NoPlace: (503, "no_place", 5),
    TurnLost: (502, "turn_lost", 0),
    SessionExpired: (410, "session_expired", 0),
    SessionUnknown: (404, "session_not_found", 0),
    TreadleError: (503, "sampler_failed", 1),
}
"""Error -> status, code, seconds after which another try is worth it (0 = not said). The session
goes on after each of them, on a fresh lane."""


class Overflow(RequestError):
    """The prompt leaves no room in the context; worded by each dialect."""

    prompt = 0
    limit = 0

    @classmethod
    def of(cls, prompt: int, limit: int) -> Overflow:
        error = cls("context length exceeded", code="context_length_exceeded", param="messages")
        error.prompt, error.limit = prompt, limit
        return error


def refusal(error: TreadleError, *, out_of_time: bool = False) -> RequestError:
    """What the client is told; `out_of_time` = the trajectory ended by its deadline."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ContextExceeded):
        return Overflow.of(error.prompt_tokens, error.max_context)
    if isinstance(error, LimitExceeded):
        status = 504 if out_of_time else 400
        return RequestError(error.message, status=status, code="limit_reached")
    if isinstance(error, DataError | ConfigError):
        return RequestError(error.message, hint=error.hint, param="messages")
    known = next(kind for kind in type(error).__mro__ if kind in SAMPLER_ERRORS)
    status, code, retry_after_s = SAMPLER_ERRORS[known]
    return RequestError(error.message, status=status, code=code, retry_after_s=retry_after_s)

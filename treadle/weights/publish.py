"""Publishing: the sampler serves what the trainer has, and says so.

Guarantees (contract 9, B119):
- publications are one at a time, whoever calls, and versions only grow;
- after `publish` returns, the sink serves weights whose fingerprint is the policy's;
- one that fails raises WeightsError with the old version still serving, and the next one works.

A sink that cannot say what it serves is published to all the same, and the publication is marked
as not proven (contract 10).

Takes: a policy, a WeightSink, a version. Gives: a Publication. Waits for: the publication in
progress, at most `wait_s`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from treadle.errors import TreadleError, WeightsError
from treadle.types import WeightSink


class Fingerprinted(Protocol):
    """A policy, as far as publishing looks at it."""

    def fingerprint(self) -> str:
        """Hash of the weights that are trained."""
        ...


@runtime_checkable
class ProvingSink(Protocol):
    """A WeightSink that can say what it serves."""

    @property
    def version(self) -> int:
        """PolicyVersion now serving."""
        ...

    def fingerprint(self) -> str:
        """Of the weights now serving, in the terms of the policy's own; empty = it cannot say."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Publication:
    version: int
    fingerprint: str
    proven: bool
    """The sink said that it serves exactly this."""


class Publisher:
    """Moves sinks from version to version, one publication at a time."""

    def __init__(self, *, wait_s: float = 600.0) -> None:
        """`wait_s`: longest wait for a publication that another caller has begun."""
        self._wait_s = wait_s
        self._turn = threading.Lock()
        self._last: dict[int, tuple[WeightSink, int]] = {}

    def publish(self, policy: Fingerprinted, sink: WeightSink, version: int) -> Publication:
        """Serve the policy's weights as `version`; returns when they are served.

        Raises WeightsError: the version is not newer than this sink's last one, the sink refused,
        what it serves is not what the policy has, or another publication did not end.
        """
        if not self._turn.acquire(timeout=self._wait_s):
            raise WeightsError(
                f"version {version} waited {self._wait_s:g} s for another publication to end",
                hint="the sampler is stuck: look at its log",
            )
        try:
            return self._publish(policy, sink, version)
        finally:
            self._turn.release()

    def _publish(self, policy: Fingerprinted, sink: WeightSink, version: int) -> Publication:
        # The sink is kept beside its number, so that the number of a dead one is not used again.
        _, last = self._last.get(id(sink), (sink, None))
        if last is not None and version <= last:
            raise WeightsError(
                f"version {version} was to be published, but {last} was already: versions only grow"
            )
        fingerprint = policy.fingerprint()
        try:
            sink.publish(version)
        except TreadleError as error:
            if isinstance(error, WeightsError):
                raise
            raise _failed(version, error) from error
        except Exception as error:
            raise _failed(version, error) from error
        proven = False
        if isinstance(sink, ProvingSink):
            served = (sink.version, sink.fingerprint())
            proven = served == (version, fingerprint)
            if not proven and served != (version, ""):
                raise WeightsError(
                    f"version {version} was published, but the sampler serves version {served[0]} "
                    f"with weights {served[1][:12]}; the policy had {fingerprint[:12]}",
                    hint="train only between publications",
                )
        self._last[id(sink)] = (sink, version)
        return Publication(version=version, fingerprint=fingerprint, proven=proven)


def _failed(version: int, error: Exception) -> WeightsError:
    return WeightsError(
        f"version {version} was not published, the one before still serves: "
        f"{type(error).__name__}: {error}"
    )

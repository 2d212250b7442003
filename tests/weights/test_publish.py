"""Publishing: one at a time, growing, proven."""

import threading

import pytest

from treadle.errors import SamplerError, WeightsError
from treadle.weights.publish import Publisher


class Weights:
    """A policy whose weights are a word."""

    def __init__(self, word: str) -> None:
        self.word = word

    def fingerprint(self) -> str:
        return self.word


class Sink:
    """A sampler that takes its policy's word, as the engine takes a snapshot."""

    def __init__(self, policy: Weights) -> None:
        self._policy = policy
        self.version = 0
        self._serves = policy.word
        self.fails: list[Exception] = []
        self.active = 0
        self.most_active = 0

    def publish(self, version: int) -> None:
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            if self.fails:
                raise self.fails.pop(0)
            self.version, self._serves = version, self._policy.word
        finally:
            self.active -= 1

    def fingerprint(self) -> str:
        return self._serves


class SilentSink:
    def publish(self, version: int) -> None:
        pass


def test_what_is_served_is_what_the_policy_has():
    policy = Weights("one")
    sink = Sink(policy)
    policy.word = "two"
    done = Publisher().publish(policy, sink, 1)
    assert (done.version, done.fingerprint, done.proven) == (1, "two", True)
    assert (sink.version, sink.fingerprint()) == (1, "two")


def test_a_sink_that_serves_other_weights_is_found_out():
    sink = Sink(Weights("stale"))
    with pytest.raises(WeightsError, match="serves version 1 with weights stale; the policy had"):
        Publisher().publish(Weights("fresh"), sink, 1)


def test_a_sink_that_cannot_say_is_reported_as_unproven():
    assert not Publisher().publish(Weights("w"), SilentSink(), 1).proven


@pytest.mark.parametrize("version", [2, 3])
def test_versions_only_grow(version):
    policy = Weights("w")
    sink, other, publisher = Sink(policy), Sink(policy), Publisher()
    publisher.publish(policy, sink, 3)
    with pytest.raises(WeightsError, match=f"version {version} .* but 3 was already"):
        publisher.publish(policy, sink, version)
    publisher.publish(policy, other, version)
    publisher.publish(policy, sink, 5)


@pytest.mark.parametrize(
    "error", [WeightsError("shapes differ"), SamplerError("engine died"), OSError("no route")]
)
def test_one_that_fails_leaves_the_old_version_and_the_next_one_works(error):
    """B119: one failing in the middle."""
    policy = Weights("w")
    sink = Sink(policy)
    sink.fails = [error]
    publisher = Publisher()
    with pytest.raises(WeightsError, match=str(error)):
        publisher.publish(policy, sink, 1)
    assert sink.version == 0
    assert publisher.publish(policy, sink, 1).version == sink.version == 1


def test_two_callers_are_served_one_after_the_other():
    """B119: a second update while one is active waits for it."""
    policy = Weights("w")
    entered, leave = threading.Event(), threading.Event()

    class Slow(Sink):
        def publish(self, version: int) -> None:
            entered.set()
            assert leave.wait(30)
            super().publish(version)

    sink = Slow(policy)
    publisher = Publisher()
    first = threading.Thread(target=publisher.publish, args=(policy, sink, 1))
    first.start()
    assert entered.wait(30)
    second = threading.Thread(target=publisher.publish, args=(policy, sink, 2))
    second.start()
    leave.set()
    first.join(30)
    second.join(30)
    assert (sink.version, sink.most_active) == (2, 1)


def test_waiting_for_another_publication_has_a_bound():
    policy = Weights("w")
    entered, leave = threading.Event(), threading.Event()

    class Slow(Sink):
        def publish(self, version: int) -> None:
            entered.set()
            leave.wait(30)
            super().publish(version)

    sink, publisher = Slow(policy), Publisher(wait_s=0.01)
    first = threading.Thread(target=publisher.publish, args=(policy, sink, 1))
    first.start()
    assert entered.wait(30)
    with pytest.raises(WeightsError, match=r"waited 0.01 s for another publication"):
        publisher.publish(policy, sink, 2)
    leave.set()
    first.join(30)
    assert sink.version == 1

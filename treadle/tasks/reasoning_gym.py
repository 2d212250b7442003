"""Tasks from the reasoning-gym library: about 100 procedural families, each with a grader.

    reasoning_gym:chain_sum    options: {"max_terms": 2, "max_digits": 2}

The library seeds item i of a data set with seed + i, so that seeds 7 and 8 share nearly all
items: a train set and a test set made of two seeds are the same set. Here instead

- the k-th draw is seeded with a hash of (family, seed, k): neighbouring seeds share nothing
  but what chance gives;
- the split of a question is a hash of its text alone, and a question drawn before is skipped:
  train, val and test are disjoint *by text*, for any two seeds and any order of calls;
- task i of a split is the i-th new question of that split in the stream of draws: a pure
  function of (seed, split, i). A few families word their questions in the order of a Python
  set; for them that holds only under a fixed PYTHONHASHSEED (disjointness always holds).

A stream ends when PATIENCE draws in a row bring no new question (products of two digits has
100 in all); `size` then counts what was found.

Graders are the library's. Some of them evaluate the reply as an expression: run them in the
workers of `treadle.reward`, where a reply that hangs or explodes costs one grading call.

Takes: a family and its options. Gives: Taskset.
"""

from __future__ import annotations

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from treadle.errors import ConfigError, DataError, TaskError, boundary, did_you_mean
from treadle.tasks.options import check_options
from treadle.tasks.text import SPLITS, digest, normalise, says, split_of
from treadle.types import Message, Provenance, Task

PATIENCE = 500
"""Draws without a new question, plus one for each question known, after which a stream ends."""

LOOKS = (256, 512, 1_024, 2_048, 4_096, 8_192, 16_384)
"""`size` draws up to the first of these where it is plain that there is no near end, and counts
no further: few repeats at the first, or mostly new questions since the one before."""

FEW_REPEATS = 6
"""Among 256 draws: probably more than 5,000 distinct questions (256^2 / 2 / 6)."""

MAX_FAILURES = 50
"""Draws in a row that may fail in the generator."""

STRICT = 0.99
"""A library score from here on is a right answer."""

FRESH = frozenset({"acre", "gsm_symbolic", "list_functions"})
"""Families whose *constructor* draws from the seed, so that each item needs a new data set."""

KNOWN_FAULTS = {
    "coin_flip": "the grader pays for the answer 0 whatever the question is",
    "game_of_life_halting": "the grader pays 1.0 for any answer that is not empty",
    "syllogism": "labels some invalid forms as valid (a middle term that is never distributed)",
}
"""What the family's own task or grader gets wrong in 0.1.25; shown by `treadle tasks`."""

_CACHE = 256


class ReasoningGym:
    """A Taskset over one family. See the module's text for what is guaranteed."""

    def __init__(
        self,
        family: str,
        *,
        options: Mapping[str, Any] | None = None,
        system: str = "",
        seed: int = 0,
        name: str = "",
    ) -> None:
        """Raises ConfigError: the library is missing, the family or an option is unknown, an
        option has the wrong type or the family refuses its value."""
        self.family = family
        self.name = name or f"reasoning_gym:{family}"
        self._system = system
        self._seed = seed
        self._dataset_cls, self._config_cls = _family(family)
        self._options = check_options(
            self._config_cls,
            options or {},
            f"reasoning_gym:{family}",
            owned={
                "seed": "the run's `seed` decides which items are made",
                "size": "a task set is as large as the family has distinct questions",
            },
        )
        self._dataset = self._make(0)
        self._lock = threading.RLock()
        self._items: dict[str, list[int]] = {split: [] for split in SPLITS}
        self._seen: set[bytes] = set()
        self._drawn = self._dry = self._failed = 0
        self._known_at = dict.fromkeys((0, *LOOKS), 0)
        self._ended = False
        self._recent: OrderedDict[int, dict[str, Any]] = OrderedDict()

    @property
    def provenance(self) -> Provenance:
        from importlib.metadata import version

        library = f"reasoning-gym {version('reasoning-gym')}"
        options = json.dumps(self._options, default=str, sort_keys=True)
        return Provenance(
            source=f"{library}, family {self.family}, options {options}", license="Apache-2.0"
        )

    @property
    def known_fault(self) -> str:
        """What is known to be wrong with this family; empty for most."""
        return KNOWN_FAULTS.get(self.family, "")

    def size(self, split: str) -> int | None:
        """Distinct questions of the split when the family runs out of them, else None.

        None means more than can be counted cheaply (over about 1,000 in all). Should a later
        `task` meet the end of such a stream, it raises IndexError and `size` is exact from
        then on.
        """
        found = self._of(split)
        with self._lock:
            for before, look in zip((0, *LOOKS), LOOKS, strict=False):
                while not self._ended and self._drawn < look:
                    self._draw()
                if self._ended:
                    return len(found)
                new = self._known_at[look] - self._known_at[before]
                if look == LOOKS[0]:
                    if look - new <= FEW_REPEATS:
                        return None
                elif new > (look - before) * (0.8 if before == LOOKS[0] else 0.5):
                    return None
            return None

    def task(self, index: int, split: str = "train") -> Task:
        found = self._of(split)
        with self._lock:
            while len(found) <= index and not self._ended:
                self._draw()
            if not 0 <= index < len(found):
                self._out_of_tasks(index, split)
            item = found[index]
            entry = self._entry(item)
        messages = (Message(role="user", content=entry["question"]),)
        if self._system:
            messages = (Message(role="system", content=self._system), *messages)
        data = {"question": entry["question"], "metadata": pack(entry["metadata"]), "item": item}
        if entry["answer"] is not None:
            data["answer"] = str(entry["answer"])
        return Task(
            id=digest(entry["question"]).hex(),
            taskset=self.name,
            messages=messages,
            data=data,
            split=split,
        )

    def grade(self, task: Task, answer: str) -> Mapping[str, float]:
        """The scores of a reply, white space at its ends aside.

        "score": 1.0 when the library's score is at least STRICT, else 0.0. "partial": the
        library's own score, clipped to [0, 1]. "lenient": 1.0 when the reply ends in the answer
        (`treadle.tasks.text.says`); absent where a family has no answer text. "grader_raised":
        1.0, present only when the library's grader could not read the reply, which is then a
        wrong answer.
        """
        reply = answer.strip()
        entry = {
            "question": task.data["question"],
            "answer": task.data.get("answer"),
            "metadata": unpack(task.data["metadata"]),
        }
        raised = {}
        try:
            partial = float(self._dataset.score_answer(reply, entry))
        except Exception:
            # The graders are written for well-formed replies; junk is the model's mistake.
            partial, raised = 0.0, {"grader_raised": 1.0}
        partial = min(max(partial, 0.0), 1.0) if math.isfinite(partial) else 0.0
        score = float(partial >= STRICT)
        scores = {"score": score, "partial": partial, **raised}
        if entry["answer"] is not None:
            scores["lenient"] = max(score, float(says(reply, entry["answer"])))
        return scores

    def gold(self, task: Task) -> str | None:
        return task.data.get("answer")

    # ----------------------------------------------------------------- the stream of draws

    def _of(self, split: str) -> list[int]:
        if split not in self._items:
            raise DataError(f"{self.name} has no split `{split}`", hint=did_you_mean(split, SPLITS))
        return self._items[split]

    def _draw(self) -> None:
        """One more draw; a question of a new text joins its split."""
        self._take_a_draw()
        if self._drawn in self._known_at:
            self._known_at[self._drawn] = len(self._seen)

    def _take_a_draw(self) -> None:
        item = int.from_bytes(digest(f"{self.family}/{self._seed}/{self._drawn}", 4), "big")
        self._drawn += 1
        try:
            question = self._entry(item)["question"]
        except TaskError:
            self._failed += 1
            self._dry += 1
            if self._failed >= MAX_FAILURES:
                raise
            return
        self._failed = 0
        text = digest(normalise(question))
        if text in self._seen:
            self._dry += 1
            self._ended = self._dry >= PATIENCE + len(self._seen)
            return
        self._dry = 0
        self._seen.add(text)
        self._items[split_of(question)].append(item)

    def _entry(self, item: int) -> dict[str, Any]:
        """What the library makes of one seed: question, answer, metadata."""
        if item in self._recent:
            self._recent.move_to_end(item)
            return self._recent[item]
        with boundary(TaskError, f"{self.name}, item seed {item}"):
            if self.family in FRESH:
                entry = self._make(item)[0]
            else:
                # Two families read the config's seed, the rest the data set's.
                self._dataset.seed = self._dataset.config.seed = item
                entry = self._dataset[0]
        self._recent[item] = entry
        if len(self._recent) > _CACHE:
            self._recent.popitem(last=False)
        return entry

    def _make(self, seed: int) -> Any:
        try:
            config = self._config_cls(**self._options, seed=seed, size=1)
            return self._dataset_cls(config=config)
        except (AssertionError, ValueError, TypeError) as error:
            raise ConfigError(
                f"reasoning_gym:{self.family} refuses its options {self._options}: {error}"
            ) from error

    def _out_of_tasks(self, index: int, split: str) -> None:
        sizes = ", ".join(f"{k} {len(v)}" for k, v in self._items.items())
        what = f"{self.name} has {len(self._seen)} distinct questions ({sizes})"
        if not self._items[split]:
            raise TaskError(
                f"{what}, none for split `{split}`",
                hint="widen the options of the family so that it has more questions",
            )
        raise IndexError(f"{what}; index {index} of split `{split}` is outside")


def _family(family: str) -> tuple[Any, Any]:
    """The family's data set and config classes."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise ConfigError(
            "task source `reasoning_gym` needs the package reasoning-gym, which is not installed",
            hint="pip install 'treadle[first-run]'",
        ) from None
    # Importing the package fills the table.
    import reasoning_gym  # noqa: F401

    if family == "composite":
        raise ConfigError(
            "reasoning_gym:composite is not a family of its own",
            hint="list several task sets, each with its `ratio`",
        )
    if family not in DATASETS:
        raise ConfigError(
            f"reasoning-gym has no family `{family}`", hint=did_you_mean(family, DATASETS)
        )
    return DATASETS[family]


# --------------------------------------------------------------------------- metadata as JSON


def pack(value: Any) -> Any:
    """Metadata as plain JSON that `unpack` restores exactly: tuples and other dict keys survive.

    Graders compare tuples and look up integer keys, and the store keeps tasks as JSON.
    Raises TaskError for a value that JSON cannot hold.
    """
    if isinstance(value, tuple):
        return {"$tuple": [pack(v) for v in value]}
    if isinstance(value, list):
        return [pack(v) for v in value]
    if isinstance(value, dict):
        if all(isinstance(k, str) and not k.startswith("$") for k in value):
            return {k: pack(v) for k, v in value.items()}
        return {"$items": [[pack(k), pack(v)] for k, v in value.items()]}
    if isinstance(value, str):
        return str(value)  # numpy's own text type becomes plain text
    if value is None or isinstance(value, bool | int | float):
        return value
    raise TaskError(f"metadata holds a {type(value).__name__}, which cannot be kept as JSON")


def unpack(value: Any) -> Any:
    """The inverse of `pack`."""
    if isinstance(value, list):
        return [unpack(v) for v in value]
    if isinstance(value, dict):
        if set(value) == {"$tuple"}:
            return tuple(unpack(v) for v in value["$tuple"])
        if set(value) == {"$items"}:
            return {unpack(k): unpack(v) for k, v in value["$items"]}
        return {k: unpack(v) for k, v in value.items()}
    return value

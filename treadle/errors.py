"""The error tree: one class per boundary, so that a record says *where* something failed.

    TreadleError
    |-- ConfigError (ValueError)     a setting is unknown, of the wrong type, or contradicts another
    |-- DataError (ValueError)       a file, row or value that the user supplied cannot be used
    |-- ModelError                   a model cannot be found, loaded or trusted
    |-- TaskError                    a task source failed to give a task
    |-- HarnessError                 the program that drives the model failed
    |-- ToolError                    a tool failed in a way that is not an answer to the model
    |-- SandboxError                 a box could not be made, used or removed
    |-- SamplerError                 an engine failed to give tokens
    |-- RewardError                  a grader failed: the trajectory is unscored, which is not 0
    |-- LimitExceeded                a trajectory used up its time, turns or tokens
    |-- WeightsError                 a checkpoint, publication or export is not what it should be
    |-- StoreError                   the run's ledger cannot be read or written
    `-- ContractError                one of our own contracts is broken; the run must stop

A message says what happened, where, with which numbers; `hint` says what to do next and is
printed on a line of its own. Every class survives pickling (graders run in other processes).
`exit_code` is what the command line returns: 2 for a user's mistake, 1 for everything else.

Takes: whatever escapes at a boundary. Gives: a typed error, or an `ErrorRecord` for the store.
"""

from __future__ import annotations

import contextlib
import difflib
import traceback
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import cast


class TreadleError(Exception):
    """Root of the tree. `hint` is the next step for the user; empty when there is none."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.hint))


def _rebuild(cls: type[TreadleError], message: str, hint: str) -> TreadleError:
    return cls(message, hint=hint)


class ConfigError(TreadleError, ValueError):
    """A setting is unknown, has the wrong type, or contradicts another."""

    exit_code = 2


class DataError(TreadleError, ValueError):
    """A file, row or value that the user supplied cannot be used."""

    exit_code = 2


class ModelError(TreadleError):
    """A model cannot be found, loaded or trusted."""

    exit_code = 2


class TaskError(TreadleError):
    """A task source failed to give a task."""


class HarnessError(TreadleError):
    """The program that drives the model failed."""


class ToolError(TreadleError):
    """A tool failed in a way that is not an answer to the model."""


class SandboxError(TreadleError):
    """A box could not be made, used or removed."""


class SamplerError(TreadleError):
    """An engine failed to give tokens."""


class RewardError(TreadleError):
    """A grader failed; the trajectory is unscored, which is not a reward of 0."""


class LimitExceeded(TreadleError):
    """A trajectory used up its time, turns or tokens."""


class WeightsError(TreadleError):
    """A checkpoint, publication or export is not what it should be."""


class StoreError(TreadleError):
    """The run's ledger cannot be read or written."""


class ContractError(TreadleError):
    """One of our own contracts is broken; training on would be wrong, so the run stops."""


class Terminated(SystemExit):
    """A signal ends this process; unlike the SystemExit of user code it is never an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorRecord:
    """An error as data: what the store keeps and the report shows."""

    kind: str
    """Name of the class in the tree, e.g. "RewardError"."""
    where: str
    """The boundary, e.g. "reward correct"."""
    message: str
    hint: str = ""
    cause: str = ""
    """Last lines of the original traceback; empty when the error was raised by us."""


@contextlib.contextmanager
def boundary(cls: type[TreadleError], where: str) -> Generator[None, None, None]:
    """Attribute whatever escapes to a boundary: `with boundary(ToolError, "tool add"): ...`.

    Errors of our tree pass unchanged, so the innermost boundary wins. Plugin authors raise
    plain Python, and may end as a program does: SystemExit is theirs, unless it is `Terminated`.
    KeyboardInterrupt and cancellation pass unchanged.
    """
    try:
        yield
    except (TreadleError, Terminated):
        raise
    except BaseExceptionGroup as group:
        if not isinstance(group, Exception) and group.subgroup((KeyboardInterrupt, Terminated)):
            raise
        raise cls(f"{where}: {type(group).__name__}: {said(group)}") from group
    except (Exception, SystemExit) as error:
        raise cls(f"{where}: {type(error).__name__}: {said(error)}") from error


def record(error: BaseException, where: str) -> ErrorRecord:
    """The record of an error for the store; the cause keeps at most the last 2,000 characters."""
    cause = error.__cause__ or (None if isinstance(error, TreadleError) else error)
    lines = "".join(traceback.format_exception(cause))[-2000:] if cause is not None else ""
    message = error.message if isinstance(error, TreadleError) else said(error)
    hint = error.hint if isinstance(error, TreadleError) else ""
    return ErrorRecord(
        kind=type(error).__name__, where=where, message=message, hint=hint, cause=lines
    )


def said(error: BaseException) -> str:
    """`str(error)`, also of an exception whose own `__str__` raises."""
    try:
        return str(error)
    except Exception as broken:
        return f"(its text cannot be made: {type(broken).__name__})"


def first_of(error: BaseException) -> BaseException:
    """The first error of a group (of a TaskGroup, say) that is not itself a group."""
    if isinstance(error, BaseExceptionGroup):
        return first_of(cast("BaseExceptionGroup[BaseException]", error).exceptions[0])
    return error


RESUME = "--resume (in Python: resume=True)"
"""In hints: an error does not know whether a shell or Python code meets it, so it names both."""

RUN_DIR = "--run-dir (in Python: run_dir=...)"


def setting(assignment: str) -> str:
    """How to say `a.b=c` in a shell, and in Python."""
    return f"--set {assignment} (in Python: settings={assignment!r})"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint naming the nearest known names; lists them all when none is near."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        return "did you mean " + " or ".join(f"`{n}`" for n in near) + "?"
    return "known: " + ", ".join(known)

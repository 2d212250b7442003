"""Values to text and bytes and back, exactly.

Guarantees: `loads(dumps(v)) == v` with the same types for JSON values, tuples, dicts with
any keys, and non-finite floats; a trajectory comes back equal, its floats bit for bit (float32
where that is exact, else float64), and NaN as the one `math.nan`, so that tuples compare equal.
Size is linear in tokens: a node holds only the tokens it added. Every blob carries a checksum;
a damaged one is a StoreError. Loading is data: nothing here can run code.

Takes: trajectories, token rows, JSON-like values. Gives: text, or zstd-compressed bytes.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import zstandard

from treadle.errors import ErrorRecord, StoreError
from treadle.types import (
    Message,
    Node,
    Party,
    Reward,
    SamplingParams,
    Source,
    Status,
    StopReason,
    Task,
    TokenSpan,
    ToolCall,
    Trajectory,
)

_LEVEL = 3
_local = threading.local()

# --------------------------------------------------------------------------- text


def dumps(value: Any, where: str = "value") -> str:
    """ASCII JSON. Raises StoreError naming the path of a value that is not data.

    Beyond JSON: `{"$tuple": [...]}`, `{"$pairs": [[k, v], ...]}` for dicts whose keys are not
    all plain text, `{"$float": "nan"}`. NumPy scalars become Python numbers.
    """
    return json.dumps(_plain(value, where), allow_nan=False, separators=(",", ":"))


def loads(text: str) -> Any:
    """The inverse of `dumps`."""
    return json.loads(text, object_hook=_restore)


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, tuple):
        return {"$tuple": [_plain(v, f"{where}.{i}") for i, v in enumerate(value)]}
    if isinstance(value, list):
        return [_plain(v, f"{where}.{i}") for i, v in enumerate(value)]
    if isinstance(value, Mapping):
        if all(isinstance(k, str) and not k.startswith("$") for k in value):
            return {str(k): _plain(v, f"{where}.{k}") for k, v in value.items()}
        pairs = [[_plain(k, where), _plain(v, f"{where}.{k}")] for k, v in value.items()]
        return {"$pairs": pairs}
    if isinstance(value, np.generic):
        return _plain(value.item(), where)
    raise StoreError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which is not data",
        hint="keep numbers, text, lists, tuples and dicts there, e.g. str(...) or .tolist()",
    )


def _restore(tree: dict[str, Any]) -> Any:
    if len(tree) == 1:
        if "$tuple" in tree:
            return tuple(tree["$tuple"])
        if "$pairs" in tree:
            return {k: v for k, v in tree["$pairs"]}
        if "$float" in tree:
            return math.nan if tree["$float"] == "nan" else float(tree["$float"])
    return tree


def dump_task(task: Task) -> str:
    """Raises StoreError naming the entry of `data` that is not data."""
    return dumps(
        {
            "id": task.id,
            "taskset": task.taskset,
            "messages": [_message(m) for m in task.messages],
            "data": task.data,
            "split": task.split,
            "date": task.date,
        },
        f"task {task.id}",
    )


def load_task(text: str) -> Task:
    tree = loads(text)
    return Task(**{**tree, "messages": tuple(_load_message(m) for m in tree["messages"])})


def dump_error(error: ErrorRecord | None) -> str | None:
    return None if error is None else dumps(asdict(error))


def load_error(text: str | None) -> ErrorRecord | None:
    return None if text is None else ErrorRecord(**loads(text))


def _message(message: Message) -> dict[str, Any]:
    tree: dict[str, Any] = {"role": message.role}
    for name in ("content", "tool_call_id", "name", "reasoning"):
        if text := getattr(message, name):
            tree[name] = text
    if message.tool_calls:
        tree["tool_calls"] = [[c.id, c.name, c.arguments] for c in message.tool_calls]
    return tree


def _load_message(tree: dict[str, Any]) -> Message:
    calls = tuple(ToolCall(id=i, name=n, arguments=a) for i, n, a in tree.get("tool_calls", ()))
    return Message(**{**tree, "tool_calls": calls})


# --------------------------------------------------------------------------- blobs


def pack_trajectory(trajectory: Trajectory) -> bytes:
    """All of a trajectory but its task, which the ledger keeps once per group."""
    arrays = _Writer()
    nodes = []
    for node in trajectory.nodes:
        tree: dict[str, Any] = {
            "id": node.id,
            "parent": node.parent,
            "party": str(node.party),
            "source": str(node.source),
            "ids": arrays.ints(node.ids),
            "trained": arrays.bools(node.trained),
            "logprobs": arrays.floats(node.logprobs),
            "versions": arrays.ints(node.versions),
            "entropies": arrays.floats(node.entropies),
        }
        if node.message is not None:
            tree["message"] = _message(node.message)
        if node.stop_reason is not None:
            tree["stop"] = str(node.stop_reason)
        if node.agent:
            tree["agent"] = list(node.agent)
        nodes.append(tree)
    reward = trajectory.reward
    tree = {
        "id": trajectory.id,
        "sample": trajectory.sample,
        "status": str(trajectory.status),
        "sampling": asdict(trajectory.sampling),
        "reward": [reward.value, dict(reward.parts), reward.error and asdict(reward.error)],
        **(
            {"flagged": [[s.node, s.start, s.end] for s in reward.flagged]}
            if reward.flagged
            else {}
        ),
        "error": trajectory.error and asdict(trajectory.error),
        "duration_s": trajectory.duration_s,
        "tools": [trajectory.tool_calls, trajectory.tool_errors],
        "info": trajectory.info,
        "nodes": nodes,
    }
    return arrays.close(dumps(tree, f"trajectory {trajectory.id}"))


def unpack_trajectory(blob: bytes, task: Task, where: str) -> Trajectory:
    """Raises StoreError naming `where` when the blob is damaged."""
    tree, arrays = _open(blob, where)
    nodes = tuple(
        Node(
            id=n["id"],
            parent=n["parent"],
            party=Party(n["party"]),
            source=Source(n["source"]),
            ids=arrays.take(n["ids"]),
            trained=arrays.take(n["trained"]),
            logprobs=arrays.take(n["logprobs"]),
            versions=arrays.take(n["versions"]),
            entropies=arrays.take(n["entropies"]),
            message=_load_message(n["message"]) if "message" in n else None,
            stop_reason=StopReason(n["stop"]) if "stop" in n else None,
            agent=tuple(n.get("agent", ())),
        )
        for n in tree["nodes"]
    )
    value, parts, error = tree["reward"]
    return Trajectory(
        id=tree["id"],
        task=task,
        sample=tree["sample"],
        nodes=nodes,
        status=Status(tree["status"]),
        sampling=SamplingParams(**tree["sampling"]),
        reward=Reward(
            value=value,
            parts=parts,
            flagged=tuple(TokenSpan(*span) for span in tree.get("flagged", ())),
            error=error and ErrorRecord(**error),
        ),
        error=tree["error"] and ErrorRecord(**tree["error"]),
        duration_s=tree["duration_s"],
        tool_calls=tree["tools"][0],
        tool_errors=tree["tools"][1],
        info=tree["info"],
    )


def pack_tokens(tokens: Mapping[str, Sequence[Any]]) -> bytes:
    """Some of a sample's fields ids, trained, logprobs, versions, advantages, prox_logprobs and
    overtaken."""
    arrays = _Writer()
    floats, ints = arrays.floats, arrays.ints
    kinds = {"ids": ints, "trained": arrays.bools, "logprobs": floats, "versions": ints}
    kinds |= {"advantages": floats, "prox_logprobs": floats, "overtaken": arrays.bools}
    return arrays.close(dumps({name: kinds[name](values) for name, values in tokens.items()}))


def unpack_tokens(blob: bytes, where: str) -> dict[str, tuple[Any, ...]]:
    """The inverse of `pack_tokens`. Raises StoreError naming `where` when it is damaged."""
    tree, arrays = _open(blob, where)
    return {name: arrays.take(spec) for name, spec in tree.items()}


def same_floats(a: Sequence[float], b: Sequence[float]) -> bool:
    """Equality with NaN equal to NaN."""
    return len(a) == len(b) and np.array_equal(
        np.asarray(a, np.float64), np.asarray(b, np.float64), equal_nan=True
    )


class _Writer:
    """Collects arrays; a spec is [dtype, length] and specs are read back in the same order."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def _add(self, array: np.ndarray, kind: str) -> list[Any]:
        self._parts.append(array.tobytes())
        return [kind, len(array)]

    def ints(self, values: Sequence[int]) -> list[Any]:
        try:
            return self._add(np.asarray(values, "<i4"), "<i4")
        except OverflowError as error:
            raise StoreError(f"a token id or version does not fit 32 bits: {error}") from error

    def bools(self, values: Sequence[bool]) -> list[Any]:
        return self._add(np.asarray(values, "|b1"), "|b1")

    def floats(self, values: Sequence[float]) -> list[Any]:
        wide = np.asarray(values, "<f8")
        with np.errstate(over="ignore"):
            narrow = wide.astype("<f4")
        if np.array_equal(narrow.astype("<f8"), wide, equal_nan=True):
            return self._add(narrow, "<f4")
        return self._add(wide, "<f8")

    def close(self, header: str) -> bytes:
        head = header.encode("ascii")
        raw = len(head).to_bytes(4, "little") + head + b"".join(self._parts)
        if not hasattr(_local, "zip"):
            _local.zip = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
        return _local.zip.compress(raw)


class _Reader:
    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def take(self, spec: list[Any]) -> tuple[Any, ...]:
        kind, length = spec
        array = np.frombuffer(self._data, kind, length, self._at)
        self._at += array.nbytes
        values = array.tolist()
        if kind in ("<f4", "<f8") and np.isnan(array).any():
            return tuple(math.nan if v != v else v for v in values)
        return tuple(values)


def _open(blob: bytes, where: str) -> tuple[dict[str, Any], _Reader]:
    try:
        raw = memoryview(zstandard.ZstdDecompressor().decompress(blob))
        size = int.from_bytes(raw[:4], "little")
        return loads(bytes(raw[4 : 4 + size]).decode("ascii")), _Reader(raw[4 + size :])
    except (zstandard.ZstdError, ValueError) as error:
        raise StoreError(
            f"{where}: stored tokens are damaged ({error})",
            hint="the disk or a copy is at fault; restore run.db from a good copy",
        ) from error

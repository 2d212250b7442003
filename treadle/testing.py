"""A sampler that says what it is told, for tests of everything above the engine; and servers that
speak the protocols of remote engines, for tests of what talks to them."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import math
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from treadle.errors import SamplerError
from treadle.sampler.checks import check_params
from treadle.types import Completion, SamplerCapabilities, SamplingParams, StopReason


class Hang:
    """A reply that never comes."""


Reply = str | tuple[int, ...] | Completion | Exception | Hang
"""Text (encoded, the stop id added), exact ids (the stop reason follows from the last one), a
whole completion, an error to raise, or nothing at all. Ids beyond max_new_tokens are cut, and the
turn then ends by LENGTH; a Completion is passed on as it is."""


@dataclass(kw_only=True)
class ScriptedSampler:
    """Implements `treadle.types.Sampler`.

    `script` is a list with one reply per turn, the same for every session, or a function of
    (session, turn) for anything else. What it was asked is kept in `calls`.
    """

    script: Sequence[Reply] | Callable[[str, int], Reply]
    encode: Callable[[str], Sequence[int]] = lambda text: tuple(text.encode())
    stop_ids: Sequence[int] = (0,)
    version: int = 0
    calls: list[tuple[str, tuple[int, ...], SamplingParams]] = field(default_factory=list)
    groups: dict[str, str] = field(default_factory=dict)
    """Group of every session ever opened."""
    open_sessions: set[str] = field(default_factory=set)
    released: list[str] = field(default_factory=list)
    turns: dict[str, int] = field(default_factory=dict)
    logprob: float = -0.5

    @property
    def capabilities(self) -> SamplerCapabilities:
        return SamplerCapabilities(release=True, score=False, shared_prefix=True, entropies=True)

    async def open(self, session: str, *, group: str = "") -> None:
        if session in self.groups:
            raise SamplerError(f"session {session} was opened before")
        self.groups[session] = group
        self.open_sessions.add(session)

    async def sample(
        self, session: str, prompt: Sequence[int], params: SamplingParams
    ) -> Completion:
        check_params(params)
        if session not in self.open_sessions:
            raise SamplerError(f"session {session} is not open")
        turn = self.turns.get(session, 0)
        self.turns[session] = turn + 1
        self.calls.append((session, tuple(prompt), params))
        await asyncio.sleep(0)
        if callable(self.script):
            reply = self.script(session, turn)
        elif turn < len(self.script):
            reply = self.script[turn]
        else:
            raise SamplerError(f"the script has {len(self.script)} replies, turn {turn} was asked")
        return await self._complete(reply, prompt, params)

    async def _complete(
        self, reply: Reply, prompt: Sequence[int], params: SamplingParams
    ) -> Completion:
        if isinstance(reply, Completion):
            return reply
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, Hang):
            await asyncio.Event().wait()
            raise AssertionError("unreachable")
        ids = (*self.encode(reply), self.stop_ids[0]) if isinstance(reply, str) else reply
        ids = tuple(ids[: params.max_new_tokens])
        stopped = bool(ids) and ids[-1] in self.stop_ids
        return Completion(
            ids=ids,
            logprobs=tuple(self.logprob - 0.01 * i for i in range(len(ids))),
            versions=(self.version,) * len(ids),
            entropies=(0.7,) * len(ids),
            stop_reason=StopReason.EOS if stopped else StopReason.LENGTH,
            prompt_tokens=len(prompt),
        )

    async def score(
        self, ids: Sequence[int], start: int, *, temperature: float = 1.0
    ) -> tuple[float, ...]:
        raise SamplerError("a script cannot score")

    async def release(self, session: str) -> None:
        self.open_sessions.discard(session)
        self.released.append(session)


# --------------------------------------------------------------------------- engines over HTTP


VOCAB = 32
"""Of the fake engines' model."""


def fake_logprobs(last: int, shift: int, temperature: float) -> list[float]:
    """The fake engines' model: the next-token logprobs after `last`. `shift` is its weights."""
    temperature = temperature or 1.0
    logits = [3.0 * math.sin(1.7 * i + 0.9 * last + shift) / temperature for i in range(VOCAB)]
    norm = math.log(math.fsum(math.exp(x) for x in logits))
    return [x - norm for x in logits]


class FakeServer:
    """An HTTP server with a small model on a thread of its own: `with FakeVllm() as fake: ...`.

    What it was asked is in `asked`, as (path, body); `refuse` holds an answer (status, text) per
    path to give instead. Weights are directories with the number `shift` in a JSON file.
    """

    def __init__(self, *, delay_s: float = 0.0, tempered: bool = True, key: str = "") -> None:
        """
        Args:
            delay_s: time per token.
            tempered: logprobs are at the sampling temperature, not always at 1.
        """
        self.delay_s, self.tempered, self.key = delay_s, tempered, key
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.refuse: dict[str, tuple[int, str]] = {}
        self.shift, self.label = 0, "default"
        self.adapters: dict[str, int] = {}
        self.most_adapters = 0
        self.running = self.aborted = 0
        self.url = ""
        self._flowing = True
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def routes(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        """Answer of each path: text, a JSON value or (status, JSON value), or a coroutine of it."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Break every connection; as a crash would. Idempotent."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _serve(self) -> None:
        from aiohttp import web

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _handle(self, request: Any) -> Any:
        from aiohttp import web

        answer = self.routes().get(request.path)
        body = await request.json() if request.can_read_body else {}
        self.asked.append((request.path, body | dict(request.query)))
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.path in self.refuse:
            status, text = self.refuse[request.path]
            return web.Response(status=status, text=text)
        if answer is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        value = answer(body)
        value = await value if inspect.isawaitable(value) else value
        if isinstance(value, str):
            return web.Response(text=value)
        status, value = value if isinstance(value, tuple) else (200, value)
        return web.json_response(value, status=status)

    def weights_at(self, folder: str) -> int:
        found = [json.loads(p.read_text()) for p in sorted(Path(folder).glob("*.json"))]
        return int(next(f["shift"] for f in found if "shift" in f))

    def load_adapter(self, body: dict[str, Any]) -> tuple[int, Any]:
        try:
            self.adapters[body["lora_name"]] = self.weights_at(body["lora_path"])
        except StopIteration:
            return 400, {"success": False, "message": "no adapter there"}
        self.most_adapters = max(self.most_adapters, len(self.adapters))
        return 200, {"success": True}

    def unload_adapter(self, body: dict[str, Any]) -> tuple[int, Any]:
        found = self.adapters.pop(body["lora_name"], None)
        return (404 if found is None else 200), {"success": found is not None}

    def flow(self, flowing: bool) -> dict[str, str]:
        self._flowing = flowing
        return {"status": "ok"}

    async def draw(
        self, prompt: Sequence[int], sampling: dict[str, Any], room: int, adapter: str
    ) -> dict[str, Any]:
        """A turn of the fake model, in no server's terms."""
        rng, ids, rows, labels = random.Random(sampling["seed"]), list(prompt), [], []
        temperature, stops = sampling["temperature"], sampling["stop_token_ids"]
        finish, self.running = "length", self.running + 1
        try:
            for _ in range(room):
                await asyncio.sleep(self.delay_s)
                while not self._flowing:
                    await asyncio.sleep(0.01)
                shift = self.adapters[adapter] if adapter else self.shift
                hot = fake_logprobs(ids[-1], shift, temperature)
                best = max(range(VOCAB), key=hot.__getitem__)
                weights = [math.exp(x) for x in hot]
                ids.append(rng.choices(range(VOCAB), weights)[0] if temperature else best)
                rows.append(hot if self.tempered else fake_logprobs(ids[-2], shift, 1.0))
                labels.append(self.label)
                if ids[-1] in stops and not sampling["ignore_eos"]:
                    finish = "stop"
                    break
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1
        new = ids[len(prompt) :]
        bounds = [i for i in range(len(new)) if i == 0 or labels[i] != labels[i - 1]]
        spans = [
            {"version": labels[i], "start": i, "end": j}
            for i, j in itertools.pairwise([*bounds, len(new)])
        ]
        return {"ids": new, "rows": rows, "spans": spans, "finish": finish}

    def scores(self, prompt: Sequence[int], adapter: str) -> list[float | None]:
        shift = self.adapters[adapter] if adapter else self.shift
        pairs = itertools.pairwise(prompt)
        return [None, *(fake_logprobs(a, shift, 1.0)[b] for a, b in pairs)]


class FakeVllm(FakeServer):
    """vLLM's part of the protocol that `VllmSampler` speaks."""

    def __init__(
        self, *, scale_out: bool = True, dev: bool = True, context: int = 64, **options: Any
    ) -> None:
        """
        Args:
            scale_out: it has /inference/v1/generate.
            dev: it has the endpoints of VLLM_SERVER_DEV_MODE.
        """
        super().__init__(**options)
        self.scale_out, self.dev, self.context = scale_out, dev, context
        self._path = "first"

    def routes(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        dev = {
            "/update_weight_version": self._name,
            "/weight_info": lambda _: {"weight_version": self.label},
            "/is_paused": lambda _: {"is_paused": not self._flowing},
            "/pause": lambda _: self.flow(False),
            "/resume": lambda _: self.flow(True),
            "/collective_rpc": self._reload,
        }
        return (dev if self.dev else {}) | {
            "/health": lambda _: "",
            "/metrics": lambda _: self._metrics(),
            "/v1/models": lambda _: {"data": self._models()},
            "/v1/load_lora_adapter": self.load_adapter,
            "/v1/unload_lora_adapter": self.unload_adapter,
            "/inference/v1/generate": self._generate,
            "/v1/completions": self._complete,
        }

    def _models(self) -> list[dict[str, Any]]:
        base = {"id": "base", "root": "first", "parent": None, "max_model_len": self.context}
        return [base, *({"id": name, "parent": "base"} for name in self.adapters)]

    def _name(self, body: dict[str, Any]) -> dict[str, bool]:
        self.label = body["new_version"]
        return {"success": True}

    def _reload(self, body: dict[str, Any]) -> tuple[int, Any]:
        # As in vLLM, a path is remembered also when it is of no use.
        self._path = body.get("kwargs", {}).get("weights_path", self._path)
        try:
            self.shift = 0 if self._path == "first" else self.weights_at(self._path)
        except StopIteration:
            return 500, {"error": "no weights there"}
        return 200, {"results": [None]}

    def _metrics(self) -> str:
        lines = {
            "vllm:num_requests_running": self.running, "vllm:num_requests_waiting": 3,
            'vllm:num_requests_waiting_by_reason{reason="capacity"}': 2,
            'vllm:num_requests_waiting_by_reason{reason="deferred"}': 1,
            "vllm:kv_cache_usage_perc": 0.97, "vllm:num_preemptions_total": 5,
            "vllm:prefix_cache_queries_total": 100, "vllm:prefix_cache_hits_total": 40,
            'vllm:cache_config_info{block_size="16",num_gpu_blocks="8",'
            'enable_prefix_caching="True"}': 1,
        }  # fmt: skip
        return "\n".join(f"{name} {value}" for name, value in lines.items())

    async def _generate(self, body: dict[str, Any]) -> Any:
        if not self.scale_out:
            return 403, {"error": {"message": "Scale-out endpoints are disabled."}}
        sampling, prompt = body["sampling_params"], body["token_ids"]
        drawn = await self._turn(body, sampling, prompt)
        count = max(1, sampling["logprobs"])
        content = [
            {
                "token_id": i,
                "logprob": row[i],
                "top_logprobs": [{"token_id": j, "logprob": row[j]} for j in _best(row, count)],
            }
            for i, row in zip(drawn["ids"], drawn["rows"], strict=True)
        ]
        choice = self._choice(drawn) | {"logprobs": {"content": content}}
        choice["weight_versions"] = drawn["spans"]
        answer = {"choices": [choice], "usage": {"prompt_tokens": len(prompt)}}
        if "prompt_logprobs" in sampling:
            answer["prompt_logprobs"] = self._prompt_logprobs(body, prompt)
        return answer

    async def _complete(self, body: dict[str, Any]) -> Any:
        drawn = await self._turn(body, body, body["prompt"])
        count = max(1, body["logprobs"])
        logprobs = {
            "tokens": [f"token_id:{i}" for i in drawn["ids"]],
            "token_logprobs": [r[i] for i, r in zip(drawn["ids"], drawn["rows"], strict=True)],
            "top_logprobs": [
                {f"token_id:{j}": row[j] for j in _best(row, count)} for row in drawn["rows"]
            ],
        }
        choice = self._choice(drawn) | {"logprobs": logprobs}
        if "prompt_logprobs" in body:
            choice["prompt_logprobs"] = self._prompt_logprobs(body, body["prompt"])
        return {"choices": [choice], "usage": {"prompt_tokens": len(body["prompt"])}}

    async def _turn(
        self, body: dict[str, Any], sampling: dict[str, Any], prompt: list[int]
    ) -> dict[str, Any]:
        # vLLM stops at the ids it is given also where the model's own are ignored.
        sampling = sampling | {"ignore_eos": False}
        adapter = "" if body["model"] == "base" else body["model"]
        return await self.draw(prompt, sampling, sampling["max_tokens"], adapter)

    def _choice(self, drawn: dict[str, Any]) -> dict[str, Any]:
        stopped = drawn["finish"] == "stop"
        return {
            "token_ids": drawn["ids"],
            "finish_reason": drawn["finish"],
            "stop_reason": drawn["ids"][-1] if stopped else None,
        }

    def _prompt_logprobs(self, body: dict[str, Any], prompt: list[int]) -> list[Any]:
        adapter = "" if body["model"] == "base" else body["model"]
        found = zip(prompt, self.scores(prompt, adapter), strict=True)
        return [None if x is None else {str(i): {"logprob": x}} for i, x in found]


class FakeSglang(FakeServer):
    """SGLang's part of the protocol that `SglangSampler` speaks."""

    def __init__(self, *, streaming: bool = True, bos_id: int = 1, **options: Any) -> None:
        super().__init__(**options)
        self.streaming, self.bos_id = streaming, bos_id
        self.sessions: dict[str, list[int]] = {}

    def routes(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        info = {"enable_streaming_session": self.streaming, "context_length": 64}
        return {
            "/model_info": lambda _: {"model_path": "first", "weight_version": self.label},
            "/server_info": lambda _: info,
            "/metrics": lambda _: self._metrics(),
            "/generate": self._generate,
            "/open_session": self._open,
            "/close_session": lambda body: str(self.sessions.pop(body["session_id"], "")),
            "/load_lora_adapter": self.load_adapter,
            "/unload_lora_adapter": self.unload_adapter,
            "/pause_generation": lambda _: self.flow(False),
            "/continue_generation": lambda _: self.flow(True),
            "/update_weights_from_disk": self._update,
            "/update_weight_version": self._name,
        }

    def _name(self, body: dict[str, Any]) -> dict[str, bool]:
        self.label = body["new_version"]
        return {"success": True}

    def _open(self, body: dict[str, Any]) -> str:
        self.sessions[body["session_id"]] = []
        return json.dumps(body["session_id"])

    def _update(self, body: dict[str, Any]) -> tuple[int, Any]:
        first = body["model_path"] == "first"
        try:
            self.shift = 0 if first else self.weights_at(body["model_path"])
        except StopIteration:
            return 400, {"success": False, "message": "no weights there"}
        self.label = body["weight_version"]
        return 200, {"success": True, "message": ""}

    def _metrics(self) -> str:
        lines = {
            "sglang:num_running_reqs": self.running, "sglang:num_queue_reqs": 2,
            "sglang:token_usage": 0.5, "sglang:max_total_num_tokens": 4096,
            "sglang:num_retracted_requests_total": 1, "sglang:prompt_tokens_total": 90,
            "sglang:cached_tokens_total": 30,
        }  # fmt: skip
        return "\n".join(f'{name}{{tp_rank="0"}} {value}' for name, value in lines.items())

    async def _generate(self, body: dict[str, Any]) -> Any:
        sampling, prompt = dict(body["sampling_params"]), list(body["input_ids"])
        sampling["seed"] = sampling["sampling_seed"]
        session = body.get("session_params", {}).get("id")
        if session is not None:
            if session not in self.sessions:
                return 400, {"error": {"message": f"session id {session} does not exist"}}
            held = self.sessions[session]
            prompt = [*held, *(prompt[1:] if held and prompt[0] == self.bos_id else prompt)]
        adapter = body.get("lora_path", "")
        drawn = await self.draw(prompt, sampling, sampling["max_new_tokens"], adapter)
        if session in self.sessions:
            self.sessions[session] = [*prompt, *drawn["ids"]]
        pairs = list(zip(drawn["ids"], drawn["rows"], strict=True))
        finish = {"type": drawn["finish"]}
        if drawn["finish"] == "stop":
            finish["matched"] = drawn["ids"][-1]
        meta = {
            "finish_reason": finish,
            "prompt_tokens": len(prompt),
            "cached_tokens": 0,
            "weight_versions": drawn["spans"],
            "output_token_logprobs": [[row[i], i, None] for i, row in pairs],
        }
        if count := body.get("top_logprobs_num"):
            meta["output_top_logprobs"] = [
                [[row[j], j, None] for j in _best(row, count)] for _, row in pairs
            ]
        if body["logprob_start_len"] == 0:
            found = zip(self.scores(prompt, adapter), prompt, strict=True)
            meta["input_token_logprobs"] = [[x, i, None] for x, i in found]
        return {"output_ids": drawn["ids"], "meta_info": meta}


def _best(row: Sequence[float], count: int) -> list[int]:
    return sorted(range(len(row)), key=lambda i: -row[i])[:count]

"""A vLLM server as a `Replica`.

    POST /inference/v1/generate      ids in, ids, logprobs and weight versions out; or, without it,
    POST /v1/completions             the same with return_token_ids, no versions
    POST /v1/load_lora_adapter       publication of an adapter
    POST /pause, /collective_rpc, /update_weight_version, /resume     of full weights
    GET  /health, /metrics           load

Start it with --enable-scale-out and --logprobs-mode processed_logprobs; publishing wants
VLLM_SERVER_DEV_MODE=1 for full weights, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 with --enable-lora
--max-loras 2 for adapters.

Guarantees, beyond those of `Remote`:
- ids are the server's: one that returns none is refused when it is opened;
- logprobs are at the sampling temperature over the full vocabulary, or the turn is refused: which
  of them the server gives is measured when it is opened. Of temperature 0 they are at 1;
- the prefix cache is keyed by version: KV of older weights serves no new prompt.

Not possible on stock vLLM, and said so: `release` only ends our bookkeeping, the server keeps or
evicts KV as it likes; entropies are not reported; scoring is at temperature 1.

Takes: prompt ids. Gives: Completions.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treadle.errors import SamplerError
from treadle.sampler.remote import prometheus
from treadle.sampler.remote.base import ASK_S, Remote, Session
from treadle.sampler.remote.http import Reply
from treadle.sampler.remote.logprobs import NUM_CANDIDATES, PROBE_TEMPERATURE, Mode, tell_mode
from treadle.sampler.remote.truth import MALFORMED, Drawn, number, stop_of, whole
from treadle.sampler.remote.weights import GRACE_S, PUBLISH_S, Served
from treadle.types import SamplerCapabilities, SamplerLoad, SamplingParams

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
DEV_HINT = "start it with VLLM_SERVER_DEV_MODE=1"
LORA_HINT = (
    "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora --max-loras 2 "
    "--max-lora-rank R; the path must be the server's too"
)
MODE_HINT = "start it with --logprobs-mode processed_logprobs"
PROBE = (1, 2, 3, 4, 5)
"""Ids that any vocabulary has."""
LIFTED_BELOW = 0.01
"""Above 0: vLLM raises what is below, or takes it for greedy, and does not say so."""
FULL = 0.95
"""Share of the KV in use from which waiting turns are taken to wait for KV. The server does not
tell the two kinds of capacity apart."""


class VllmSampler(Remote):
    """See the module; arguments as of `Remote`."""

    def __init__(self, url: str, *, model: str = "", **options: Any) -> None:
        """
        Args:
            model: name under which the server serves it; empty = the first it lists.
        """
        super().__init__(url, **options)
        self._model = model
        self._path = GENERATE
        self._mode = Mode.TEMPERED
        self._shared_prefix = False
        self._first_weights = ""

    @property
    def capabilities(self) -> SamplerCapabilities:
        return SamplerCapabilities(
            release=False, score=True, shared_prefix=self._shared_prefix, entropies=False
        )

    # ------------------------------------------------------------------ opening

    async def _attach(self) -> None:
        models = [m for m in await self._listed() if not m.get("parent")]
        names = [str(m.get("id")) for m in models]
        self._model = self._model or (names[0] if names else "")
        if self._model not in names:
            raise SamplerError(f"{self.name} serves {names}, not `{self._model}`")
        listed = models[names.index(self._model)]
        self._first_weights = str(listed.get("root") or "")
        length = listed.get("max_model_len")
        self._context = length if isinstance(length, int) else None
        paused = await self._io.request("GET", "/is_paused", limit_s=ASK_S, attempts=3)
        if paused.status < 400 and paused.json().get("is_paused"):
            raise SamplerError(
                f"{self.name} is paused: a publication to it broke off",
                hint="restart it, or POST /resume if you know what it holds",
            )
        await self._name_weights()
        cold = await self._probe(1.0)
        self._mode = tell_mode(cold, await self._probe(PROBE_TEMPERATURE), self.name)
        info = (await self._metrics()).of("vllm:cache_config_info")
        self._shared_prefix = any(s.labels.get("enable_prefix_caching") == "True" for s in info)

    async def _listed(self) -> list[dict[str, Any]]:
        reply = await self._io.request("GET", "/v1/models", limit_s=ASK_S, attempts=3)
        return _models(reply.json(), reply.where)

    async def _name_weights(self) -> None:
        """Give what the server holds the name of our version, where it lets us."""
        label = str(self._served.version)
        body = {"new_version": label}
        reply = await self._io.request(
            "POST", "/update_weight_version", body, limit_s=ASK_S, attempts=3
        )
        self._labels = {label if reply.status < 400 else "default": self._served.version}

    async def _probe(self, temperature: float) -> dict[int, float]:
        """Logprobs of the best candidates of one position; settles which path there is."""
        params = SamplingParams(max_new_tokens=1, temperature=temperature)
        reply = await self._ask(self._body(PROBE, params, self._served, NUM_CANDIDATES), ASK_S)
        if self._path == GENERATE and reply.status in (403, 404, 405):
            self._path = COMPLETIONS
            reply = await self._ask(self._body(PROBE, params, self._served, NUM_CANDIDATES), ASK_S)
        answer = reply.json()
        drawn = self._read(answer, reply.where)
        self._tells_versions = bool(drawn.spans)
        try:
            logprobs = answer["choices"][0]["logprobs"]
            if self._path == GENERATE:
                top = logprobs["content"][0]["top_logprobs"]
                return {whole(t["token_id"]): number(t["logprob"]) for t in top}
            top = logprobs["top_logprobs"][0]
            return {_id_in(key): number(x) for key, x in top.items()}
        except MALFORMED as error:
            raise self._malformed(reply, error) from error

    # ------------------------------------------------------------------ turns

    def _check_params(self, params: SamplingParams) -> None:
        cut = params.top_p < 1 or params.top_k > 0
        if 0 < params.temperature < LIFTED_BELOW:
            raise SamplerError(
                f"{self.name} draws at temperature {LIFTED_BELOW:g} what is asked for at "
                f"{params.temperature:g}",
                hint="0 is greedy",
            )
        if self._mode is Mode.RAW and params.temperature not in (0.0, 1.0):
            raise SamplerError(
                f"{self.name} gives logprobs at temperature 1, the turn is drawn at "
                f"{params.temperature:g}",
                hint=MODE_HINT,
            )
        if self._mode is Mode.TEMPERED and cut and params.temperature > 0:
            raise SamplerError(
                f"{self.name} gives logprobs of the distribution after top-p and top-k, not of "
                "the full one",
                hint="draw with top_p 1 and top_k 0; or, for evals at temperature 1, start it with "
                "--logprobs-mode raw_logprobs",
            )

    async def _generate(
        self, session: Session, served: Served, prompt: tuple[int, ...], params: SamplingParams
    ) -> Drawn:
        body = self._body(prompt, params, served, 0)
        reply = await self._ask(body, params.deadline_s + GRACE_S, attempts=3)
        return self._read(reply.json(), reply.where)

    async def _close_remote(self, session: Session) -> None:
        """vLLM has no sessions: what it holds for one is its cache's to evict."""

    async def _ask(self, body: Mapping[str, Any], limit_s: float, attempts: int = 1) -> Reply:
        return await self._io.request("POST", self._path, body, limit_s=limit_s, attempts=attempts)

    def _body(
        self, prompt: Sequence[int], params: SamplingParams, served: Served, candidates: int
    ) -> dict[str, Any]:
        """Everything that shapes the draw, so that no default of the server has a say."""
        room = params.max_new_tokens
        if self._context is not None:
            room = min(room, self._context - len(prompt))
        sampling: dict[str, Any] = {
            "max_tokens": room,
            "min_tokens": 0,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "seed": self._seed(params),
            "stop": list(params.stop),
            # The ids that end a turn are ours where we know them, else the model's own.
            "stop_token_ids": list(self._stop_ids or ()),
            "ignore_eos": self._stop_ids is not None,
            "skip_special_tokens": False,
            "logprobs": candidates,
        }
        shared = {"model": served.adapter or self._model, "cache_salt": f"v{served.version}"}
        if self._path == GENERATE:
            sampling["detokenize"] = bool(params.stop)
            return {
                "request_id": self._new_id(),
                "token_ids": list(prompt),
                "sampling_params": sampling,
                **shared,
            }
        return {
            "prompt": list(prompt),
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "stream": False,
            **sampling,
            **shared,
        }

    def _read(self, answer: Mapping[str, Any], where: str) -> Drawn:
        """An answer of either path. Raises SamplerError: it is not of the expected form."""
        try:
            (choice,) = answer["choices"]
            if choice.get("token_ids") is None:
                raise SamplerError(
                    f"{where} returned no token ids",
                    hint="token ids are never made from text: a newer vLLM is needed",
                )
            ids = tuple(whole(i) for i in choice["token_ids"])
            usage = answer["usage"]
            details = usage.get("prompt_tokens_details")
            cached = None if details is None else details.get("cached_tokens")
            spans = choice.get("weight_versions")
            return Drawn(
                ids=ids,
                logprobs=_logprobs(choice["logprobs"], ids, where),
                finish=str(choice["finish_reason"]),
                stop=stop_of(choice.get("stop_reason")),
                prompt_tokens=whole(usage["prompt_tokens"]),
                cached_tokens=0 if cached is None else whole(cached),
                spans=tuple(_span(s) for s in spans) if spans else None,
            )
        except MALFORMED as error:
            raise SamplerError(
                f"{where} gave an answer of an unknown form: {type(error).__name__}: {error}",
                hint="is this vLLM? 0.32 was tested",
            ) from error

    def _malformed(self, reply: Reply, error: Exception) -> SamplerError:
        return SamplerError(
            f"{reply.where} gave an answer of an unknown form ({type(error).__name__}: {error}): "
            f"{reply.quote()}",
            hint="is this vLLM? 0.32 was tested",
        )

    async def _score(self, ids: tuple[int, ...], served: Served) -> Sequence[float | None]:
        params = SamplingParams(max_new_tokens=1)
        body = self._body(ids, params, served, 0)
        (body["sampling_params"] if self._path == GENERATE else body)["prompt_logprobs"] = 0
        reply = await self._ask(body, PUBLISH_S, attempts=3)
        answer = reply.json()
        try:
            rows = answer.get("prompt_logprobs") or answer["choices"][0]["prompt_logprobs"]
            return [
                None if row is None else number(row[str(i)]["logprob"])
                for i, row in zip(ids, rows, strict=True)
            ]
        except MALFORMED as error:
            raise self._malformed(reply, error) from error

    # ------------------------------------------------------------------ load

    async def _metrics(self) -> prometheus.Samples:
        reply = await self._io.request("GET", "/metrics", limit_s=ASK_S, attempts=2)
        return prometheus.parse(reply.ok().text)

    async def _load(self) -> SamplerLoad:
        health, metrics = await asyncio.gather(
            self._io.request("GET", "/health", limit_s=ASK_S), self._metrics()
        )
        health.ok("its engine is dead: look at its log, and restart it")
        return read_load(metrics, len(self._sessions), self.name)

    # ------------------------------------------------------------------ weights

    async def _load_adapter(self, name: str, folder: Path) -> None:
        # In place, so that a second try is no error; the name is of this version alone.
        body = {"lora_name": name, "lora_path": str(folder), "load_inplace": True}
        await self._post(
            "/v1/load_lora_adapter", body, limit_s=PUBLISH_S, attempts=3, hint=LORA_HINT
        )
        if not any(m.get("id") == name for m in await self._listed()):
            raise SamplerError(f"{self.name} took adapter {name} and does not list it")

    async def _unload_adapter(self, name: str) -> None:
        await self._post("/v1/unload_lora_adapter", {"lora_name": name}, attempts=3)

    async def _pause(self) -> None:
        keep = {"mode": "keep"}
        await self._post("/pause", params=keep, limit_s=PUBLISH_S, attempts=3, hint=DEV_HINT)

    async def _resume(self) -> None:
        await self._post("/resume", limit_s=ASK_S, attempts=3, hint=DEV_HINT)

    async def _load_weights(self, version: int, folder: Path | None) -> None:
        # Always with a path: without one it is the last that was tried, a wrong one included.
        path = self._first_weights if folder is None else str(folder)
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        # vLLM breaks the connection after an error: each of these may need a second one.
        await self._post("/collective_rpc", body, limit_s=PUBLISH_S, attempts=3, hint=DEV_HINT)
        label = {"new_version": str(version)}
        await self._post("/update_weight_version", label, attempts=3, hint=DEV_HINT)
        info = (await self._io.request("GET", "/weight_info", limit_s=ASK_S, attempts=3)).json()
        if info.get("weight_version") != str(version):
            raise SamplerError(
                f"{self.name} serves weights named {info.get('weight_version')!r} after version "
                f"{version} was loaded",
                hint="does another program publish to this server?",
            )


def _logprobs(given: Any, ids: tuple[int, ...], where: str) -> tuple[float, ...]:
    """One per id, each of that very id (B029)."""
    if given is None:
        raise SamplerError(f"{where} returned no logprobs")
    if "content" in given:
        entries = [(whole(e["token_id"]), number(e["logprob"])) for e in given["content"] or ()]
    else:
        tokens = [_id_in(t) for t in given["tokens"]]
        values = [math.nan if x is None else number(x) for x in given["token_logprobs"]]
        entries = list(zip(tokens, values, strict=True))
    for position, ((i, _), wanted) in enumerate(zip(entries, ids, strict=False)):
        if i != wanted:
            raise SamplerError(
                f"{where} gave at position {position} the logprob of id {i}, drawn was {wanted}"
            )
    return tuple(x for _, x in entries)


def _span(span: Mapping[str, Any]) -> tuple[str, int, int]:
    return str(span["version"]), whole(span["start"]), whole(span["end"])


def _id_in(text: str) -> int:
    """The id of "token_id:17". Raises ValueError."""
    prefix, _, digits = text.partition(":")
    if prefix != "token_id" or not (digits.isascii() and digits.isdecimal()):
        raise ValueError(f"expected `token_id:` and a number, got {text[:40]!r}")
    return int(digits)


def _models(answer: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """What a server lists. Raises SamplerError."""
    listed = answer.get("data")
    if not isinstance(listed, list):
        raise SamplerError(f"{where} listed no models", hint="is this the right server?")
    return [m for m in listed if isinstance(m, dict)]


def read_load(metrics: prometheus.Samples, sessions: int, name: str) -> SamplerLoad:
    """vLLM's metrics as a SamplerLoad. Raises SamplerError when the vital ones are missing."""
    running = metrics.total("vllm:num_requests_running")
    usage = metrics.mean("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
    if running is None or usage is None:
        raise SamplerError(
            f"{name}: /metrics has no vllm:num_requests_running or vllm:kv_cache_usage_perc",
            hint="is this vLLM, and were its stats turned off?",
        )
    waiting = metrics.total("vllm:num_requests_waiting") or 0.0
    capacity = metrics.total("vllm:num_requests_waiting_by_reason", reason="capacity")
    for_kv = (waiting if capacity is None else capacity) if usage >= FULL else 0.0
    return SamplerLoad(
        running=round(running),
        waiting=round(waiting),
        waiting_for_kv=round(for_kv),
        sessions=sessions,
        kv_usage=min(1.0, max(0.0, usage)),
        kv_tokens=sum(_capacity(s.labels) for s in metrics.of("vllm:cache_config_info")),
        preemptions=round(metrics.total("vllm:num_preemptions") or 0),
        prefix_query_tokens=round(metrics.total("vllm:prefix_cache_queries") or 0),
        prefix_hit_tokens=round(metrics.total("vllm:prefix_cache_hits") or 0),
    )


def _capacity(labels: Mapping[str, str]) -> int:
    """KV tokens of one engine."""
    for product in (("kv_cache_size_tokens",), ("num_gpu_blocks", "block_size")):
        try:
            return math.prod(int(labels[key]) for key in product)
        except (KeyError, ValueError):
            continue
    return 0

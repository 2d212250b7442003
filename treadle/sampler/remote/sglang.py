"""An SGLang server as a `Replica`.

    POST /generate                     input_ids in, output_token_logprobs out
    POST /open_session, /close_session     streaming sessions, which own their KV
    POST /load_lora_adapter            publication of an adapter
    POST /pause_generation, /update_weights_from_disk, /continue_generation     of full weights
    GET  /metrics                      load

Start it with --enable-metrics, and with --enable-streaming-session for sessions that keep their KV
until `release`.

Guarantees, beyond those of `Remote`:
- with streaming sessions a turn sends only what its prompt adds, the server keeps the rest; a
  rewritten history, a turn that broke off, newer weights or an addition that begins with the BOS id
  (which the server would drop) begin a new session of the server, with the whole prompt;
- the length of the context that the server continued is compared with the prompt's, each turn;
- logprobs are at the sampling temperature over the full vocabulary, also with top-p and top-k: it
  is measured when the server is opened whether SGLANG_RETURN_ORIGINAL_LOGPROB says otherwise.

Not possible, and said so: entropies; scoring at other temperatures than 1; seeds have an effect
only with --enable-deterministic-inference.

Tested against a fake of the protocol of 0.5.23, not against a server.

Takes: prompt ids. Gives: Completions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treadle.errors import SamplerError, TreadleError
from treadle.sampler.remote import prometheus
from treadle.sampler.remote.base import ASK_S, Remote, Session
from treadle.sampler.remote.http import Reply
from treadle.sampler.remote.logprobs import NUM_CANDIDATES, PROBE_TEMPERATURE, Mode, tell_mode
from treadle.sampler.remote.truth import MALFORMED, Drawn, number, stop_of, whole
from treadle.sampler.remote.weights import GRACE_S, PUBLISH_S, Served, logger
from treadle.types import SamplerCapabilities, SamplerLoad, SamplingParams

PROBE = (1, 2, 3, 4, 5)
"""Ids that any vocabulary has."""
FULL = 0.95
"""Share of the KV in use from which waiting turns are taken to wait for KV."""
SESSION_S = 3600.0
"""The server closes a session that was not used for this long, should we be gone."""
METRICS_HINT = "start it with --enable-metrics"


class SglangSampler(Remote):
    """See the module; arguments as of `Remote`."""

    def __init__(self, url: str, *, bos_id: int | None = None, **options: Any) -> None:
        """
        Args:
            bos_id: the tokenizer's BOS; None = it has none. Only streaming sessions ask for it.
        """
        super().__init__(url, **options)
        self._bos_id = bos_id
        self._streaming = False
        self._prefix_caching = True
        self._mode = Mode.TEMPERED
        self._first_weights = ""

    @property
    def capabilities(self) -> SamplerCapabilities:
        return SamplerCapabilities(
            release=self._streaming,
            score=True,
            shared_prefix=self._prefix_caching,
            entropies=False,
        )

    # ------------------------------------------------------------------ opening

    async def _attach(self) -> None:
        model = (await self._get("/model_info")).json()
        info = (await self._get("/server_info")).json()
        self._first_weights = str(model.get("model_path", ""))
        self._streaming = bool(info.get("enable_streaming_session"))
        self._prefix_caching = not info.get("disable_radix_cache")
        length = info.get("context_length") or info.get("max_req_input_len")
        self._context = length if isinstance(length, int) else None
        label = str(self._served.version)
        body = {"new_version": label, "abort_all_requests": False}
        reply = await self._io.request("POST", "/update_weight_version", body, limit_s=ASK_S)
        known = label if reply.status < 400 else str(model.get("weight_version", "default"))
        self._labels = {known: self._served.version}
        cold = await self._probe(1.0)
        self._mode = tell_mode(cold, await self._probe(PROBE_TEMPERATURE), self.name)

    async def _probe(self, temperature: float) -> dict[int, float]:
        params = SamplingParams(max_new_tokens=1, temperature=temperature)
        body = self._body(PROBE, params, self._served) | {"top_logprobs_num": NUM_CANDIDATES}
        reply = await self._io.request("POST", "/generate", body, limit_s=ASK_S, attempts=2)
        answer = reply.json()
        self._tells_versions = bool(self._read(answer, reply.where).spans)
        try:
            top = answer["meta_info"]["output_top_logprobs"][0]
            return {whole(entry[1]): number(entry[0]) for entry in top}
        except MALFORMED as error:
            raise self._malformed(reply.where, error) from error

    async def _get(self, path: str) -> Reply:
        return await self._io.request("GET", path, limit_s=ASK_S, attempts=3)

    # ------------------------------------------------------------------ turns

    def _check_params(self, params: SamplingParams) -> None:
        if self._mode is Mode.RAW and params.temperature not in (0.0, 1.0):
            raise SamplerError(
                f"{self.name} gives logprobs at temperature 1, the turn is drawn at "
                f"{params.temperature:g}",
                hint="start it without SGLANG_RETURN_ORIGINAL_LOGPROB",
            )

    async def _generate(
        self, session: Session, served: Served, prompt: tuple[int, ...], params: SamplingParams
    ) -> Drawn:
        limit_s = params.deadline_s + GRACE_S
        if not self._streaming:
            body = self._body(prompt, params, served)
            reply = await self._io.request("POST", "/generate", body, limit_s=limit_s, attempts=3)
            return self._read(reply.json(), reply.where)
        new = await self._continue(session, served, prompt)
        body = self._body(new, params, served, len(prompt))
        body["session_params"] = {"id": session.remote}
        try:
            # Once only: a second try would continue what the first may have left.
            reply = await self._io.request("POST", "/generate", body, limit_s=limit_s)
            drawn = self._read(reply.json(), reply.where)
            if drawn.finish == "abort" or drawn.prompt_tokens != len(prompt):
                await self._close_remote(session)
        except BaseException:
            self._abandon(session)
            raise
        session.held = prompt + drawn.ids
        return drawn

    async def _continue(
        self, session: Session, served: Served, prompt: tuple[int, ...]
    ) -> tuple[int, ...]:
        """What the server's session does not hold yet; a new one where it cannot go on."""
        n = len(session.held)
        goes_on = (
            session.remote
            and session.epoch is served
            and len(prompt) > n
            and prompt[:n] == session.held
            and prompt[n] != self._bos_id
        )
        if goes_on:
            return prompt[n:]
        await self._close_remote(session)
        name = f"{self._new_id()}"
        body = {
            "capacity_of_str_len": self._context or 1 << 20,
            "session_id": name,
            "streaming": True,
            "timeout": SESSION_S,
        }
        await self._post("/open_session", body)
        session.remote, session.held, session.epoch = name, (), served
        return prompt

    async def _close_remote(self, session: Session) -> None:
        name, session.remote, session.held = session.remote, "", ()
        if name:
            await self._post("/close_session", {"session_id": name}, attempts=3)

    def _abandon(self, session: Session) -> None:
        """Close the server's session without making a broken or cancelled caller wait."""

        async def close(name: str) -> None:
            try:
                await self._post("/close_session", {"session_id": name}, attempts=3)
            except TreadleError as error:
                logger.warning("%s: session %s was not closed: %s", self.name, name, error)

        name, session.remote, session.held = session.remote, "", ()
        if name:
            self._start(close(name))

    def _body(
        self,
        new: Sequence[int],
        params: SamplingParams,
        served: Served,
        length: int | None = None,
    ) -> dict[str, Any]:
        """Everything that shapes the draw; `length` of the whole prompt where `new` is its end."""
        room = params.max_new_tokens
        if self._context is not None:
            room = min(room, self._context - (len(new) if length is None else length))
        body: dict[str, Any] = {
            "rid": self._new_id(),
            "input_ids": list(new),
            "sampling_params": {
                "max_new_tokens": room,
                "min_new_tokens": 0,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k or -1,
                "min_p": 0.0,
                "frequency_penalty": 0.0,
                "presence_penalty": 0.0,
                "repetition_penalty": 1.0,
                "stop": list(params.stop),
                "stop_token_ids": list(self._stop_ids or ()),
                # Here it turns off every stop id, ours too.
                "ignore_eos": self._stop_ids == (),
                "sampling_seed": self._seed(params),
                "skip_special_tokens": False,
                "no_stop_trim": True,
            },
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": False,
            "cache_salt": f"v{served.version}",
        }
        if served.adapter:
            body["lora_path"] = served.adapter
        return body

    def _read(self, answer: Mapping[str, Any], where: str) -> Drawn:
        """Raises SamplerError: the answer is not of the expected form."""
        try:
            meta = answer["meta_info"]
            finish = meta["finish_reason"]
            pairs = meta.get("output_token_logprobs")
            if pairs is None:
                raise SamplerError(f"{where} returned no logprobs")
            ids = tuple(whole(entry[1]) for entry in pairs)
            given = answer.get("output_ids")
            if given is not None and tuple(whole(i) for i in given) != ids:
                raise SamplerError(
                    f"{where} returned {len(given)} ids and logprobs of {len(ids)} others"
                )
            spans = meta.get("weight_versions")
            matched, cached = finish.get("matched"), meta.get("cached_tokens")
            return Drawn(
                ids=ids,
                logprobs=tuple(number(entry[0]) for entry in pairs),
                finish=str(finish["type"]),
                stop=stop_of(matched[-1] if isinstance(matched, list) else matched),
                prompt_tokens=whole(meta["prompt_tokens"]),
                cached_tokens=0 if cached is None else whole(cached),
                spans=tuple((str(s["version"]), whole(s["start"]), whole(s["end"])) for s in spans)
                if spans
                else None,
            )
        except MALFORMED as error:
            raise self._malformed(where, error) from error

    def _malformed(self, where: str, error: Exception) -> SamplerError:
        return SamplerError(
            f"{where} gave an answer of an unknown form: {type(error).__name__}: {error}",
            hint="is this SGLang? the protocol of 0.5.23 is spoken",
        )

    async def _score(self, ids: tuple[int, ...], served: Served) -> Sequence[float | None]:
        body = self._body(ids, SamplingParams(max_new_tokens=1), served)
        body["logprob_start_len"] = 0
        reply = await self._io.request("POST", "/generate", body, limit_s=PUBLISH_S, attempts=3)
        answer = reply.json()
        try:
            pairs = answer["meta_info"]["input_token_logprobs"]
            found = tuple(whole(entry[1]) for entry in pairs)
            values = [None if entry[0] is None else number(entry[0]) for entry in pairs]
        except MALFORMED as error:
            raise self._malformed(reply.where, error) from error
        if found != ids:
            raise SamplerError(f"{reply.where} scored {len(found)} other ids than the {len(ids)}")
        return values

    # ------------------------------------------------------------------ load

    async def _load(self) -> SamplerLoad:
        reply = await self._io.request("GET", "/metrics", limit_s=ASK_S, attempts=2)
        metrics = prometheus.parse(reply.ok(METRICS_HINT).text)
        return read_load(metrics, len(self._sessions), self.name)

    # ------------------------------------------------------------------ weights

    async def _load_adapter(self, name: str, folder: Path) -> None:
        body = {"lora_name": name, "lora_path": str(folder)}
        await self._succeed("/load_lora_adapter", body, "start it with --enable-lora")

    async def _unload_adapter(self, name: str) -> None:
        await self._succeed("/unload_lora_adapter", {"lora_name": name})

    async def _pause(self) -> None:
        body = {"mode": "in_place"}
        await self._post("/pause_generation", body, limit_s=PUBLISH_S, attempts=3)

    async def _resume(self) -> None:
        await self._post("/continue_generation", {}, attempts=3)

    async def _load_weights(self, version: int, folder: Path | None) -> None:
        body = {
            "model_path": str(folder) if folder is not None else self._first_weights,
            "weight_version": str(version),
            # Turns in flight keep their KV; no other prompt finds it, the salt has changed.
            "flush_cache": False,
            "abort_all_requests": False,
        }
        await self._succeed("/update_weights_from_disk", body, attempts=3)
        held = (await self._get("/model_info")).json().get("weight_version")
        if held != str(version):
            raise SamplerError(
                f"{self.name} serves weights named {held!r} after version {version} was loaded"
            )

    async def _succeed(
        self, path: str, body: Mapping[str, Any], hint: str = "", attempts: int = 1
    ) -> None:
        reply = await self._io.request("POST", path, body, limit_s=PUBLISH_S, attempts=attempts)
        if not reply.json(hint).get("success"):
            raise SamplerError(f"{reply.where} did not succeed: {reply.quote()}", hint=hint)


def read_load(metrics: prometheus.Samples, sessions: int, name: str) -> SamplerLoad:
    """SGLang's metrics as a SamplerLoad. Raises SamplerError when the vital ones are missing."""
    running = metrics.total("sglang:num_running_reqs")
    usage = metrics.mean("sglang:token_usage")
    if running is None or usage is None:
        raise SamplerError(
            f"{name}: /metrics has no sglang:num_running_reqs or sglang:token_usage",
            hint=METRICS_HINT,
        )
    waiting = metrics.total("sglang:num_queue_reqs") or 0.0
    hits = metrics.total("sglang:cached_tokens") or 0.0
    return SamplerLoad(
        running=round(running),
        waiting=round(waiting),
        waiting_for_kv=round(waiting if usage >= FULL else 0.0),
        sessions=sessions,
        kv_usage=min(1.0, max(0.0, usage)),
        kv_tokens=round(metrics.total("sglang:max_total_num_tokens") or 0),
        preemptions=round(metrics.total("sglang:num_retracted_requests") or 0),
        prefix_query_tokens=round(metrics.total("sglang:prompt_tokens") or 0),
        prefix_hit_tokens=round(hits),
    )

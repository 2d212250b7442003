"""VllmSampler against a server that speaks the documented protocol."""

import asyncio
import copy

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.sampler import remote_cases as cases
from tests.sampler.remote_cases import PROMPT, turn, until, weights
from treadle.errors import SamplerError, TreadleError, WeightsError
from treadle.sampler.remote import VllmSampler
from treadle.testing import FakeVllm
from treadle.types import Replica, SamplingParams, StopReason


def sampler_of(fake, **options):
    return VllmSampler(fake.url, **{"stop_ids": ()} | options)


def older(**options):
    """A server without ids-in-ids-out."""
    return FakeVllm(scale_out=False, **options)


@pytest.mark.parametrize("fake", [FakeVllm, older], ids=["generate", "completions"])
@pytest.mark.parametrize("case", cases.CASES, ids=lambda c: c.__name__)
def test_vllm(case, fake):
    case(fake, sampler_of)


@pytest.mark.parametrize("case", cases.FOLDER_CASES, ids=lambda c: c.__name__)
def test_vllm_weights(case, tmp_path):
    case(FakeVllm, sampler_of, tmp_path)


def test_vllm_that_may_be_half_updated_serves_no_more(tmp_path):
    cases.a_server_that_may_be_half_updated_serves_no_more(
        FakeVllm, sampler_of, tmp_path, "/collective_rpc"
    )


def test_it_says_what_it_can_do():
    with FakeVllm() as fake, sampler_of(fake) as sampler:
        assert isinstance(sampler, Replica)
        can = sampler.capabilities
    assert (can.release, can.score, can.shared_prefix, can.entropies) == (False, True, True, False)


def test_load_is_read_from_the_servers_metrics():
    async def main():
        with FakeVllm() as fake, sampler_of(fake) as sampler:
            await sampler.open("a")
            return await sampler.load()

    load = asyncio.run(main())
    assert (load.running, load.waiting, load.waiting_for_kv, load.sessions) == (0, 3, 2, 1)
    assert (load.kv_usage, load.kv_tokens, load.preemptions) == (0.97, 128, 5)
    assert (load.prefix_query_tokens, load.prefix_hit_tokens) == (100, 40)


def test_a_dead_engine_behind_a_living_server_is_not_healthy():
    with FakeVllm() as fake, sampler_of(fake) as sampler:
        fake.refuse["/health"] = (503, "")
        with pytest.raises(SamplerError, match="its engine is dead"):
            asyncio.run(sampler.load())


def test_everything_that_shapes_the_draw_is_sent():
    """The server's defaults (generation_config.json) must have no say (B189)."""

    async def main():
        with older() as fake, sampler_of(fake, stop_ids=(2,)) as sampler:
            await turn(sampler, temperature=0.7, seed=2**63 - 1)
            return fake.asked[-1][1]

    body = asyncio.run(main())
    sent = {k: body[k] for k in ("temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos")}
    assert sent == {
        "temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 2**63 - 1,
        "ignore_eos": True,
    }  # fmt: skip
    assert body["stop_token_ids"] == [2] and body["repetition_penalty"] == 1.0
    assert body["presence_penalty"] == body["frequency_penalty"] == 0.0


def test_the_prefix_cache_is_keyed_by_version(tmp_path):
    """B057: KV of older weights serves no new prompt."""

    async def main():
        with FakeVllm() as fake, sampler_of(fake) as sampler:
            await turn(sampler)
            await sampler.adopt(1, weights(tmp_path / "w", 1))
            await turn(sampler, opened=True)
            return [b["cache_salt"] for path, b in fake.asked if "cache_salt" in b][-2:]

    assert asyncio.run(main()) == ["v0", "v1"]


def test_raw_logprobs_serve_temperature_1_alone():
    """B025: logprobs at another temperature than the draw's are refused, not scaled."""

    async def main():
        with FakeVllm(tempered=False) as fake, sampler_of(fake) as sampler:
            for good in ({}, {"temperature": 0.0}, {"top_p": 0.9}):
                done = await turn(sampler, str(good), **good)
                assert done.logprobs == pytest.approx(cases.want(PROMPT, done.ids, [0] * 6))
            with pytest.raises(SamplerError, match="--logprobs-mode processed_logprobs"):
                await turn(sampler, "t", temperature=0.5)

    asyncio.run(main())


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 5}])
def test_processed_logprobs_of_a_cut_distribution_are_refused(cut):
    async def main():
        with FakeVllm() as fake, sampler_of(fake) as sampler:
            with pytest.raises(SamplerError, match="after top-p and top-k"):
                await turn(sampler, **cut)
            return await turn(sampler, "greedy", temperature=0.0, **cut)

    assert len(asyncio.run(main()).ids) == 6


def test_without_versions_in_its_answers_a_server_is_drained_before_weights_change(tmp_path):
    async def main():
        with older(delay_s=0.02) as fake, sampler_of(fake) as sampler:
            old = asyncio.ensure_future(turn(sampler, "old", new=20))
            await until(lambda: fake.running == 1)
            adopted = asyncio.ensure_future(sampler.adopt(1, weights(tmp_path / "w", 2)))
            await until(lambda: not sampler._flowing.is_set())
            new = await turn(sampler, "new")
            await adopted
            return await old, new

    old, new = asyncio.run(main())
    assert old.versions == (0,) * 20 and new.versions == (1,) * 6
    assert old.logprobs == pytest.approx(cases.want(PROMPT, old.ids, [0] * 20))
    assert new.logprobs == pytest.approx(cases.want(PROMPT, new.ids, [2] * 6))


def test_full_weights_want_the_dev_endpoints(tmp_path):
    async def main():
        with FakeVllm(dev=False) as fake, sampler_of(fake, version=3) as sampler:
            with pytest.raises(WeightsError, match=r"(?s)3 still serves.*VLLM_SERVER_DEV_MODE=1"):
                await sampler.adopt(4, weights(tmp_path / "w", 2))
            return await turn(sampler)

    assert asyncio.run(main()).versions == (3,) * 6


def test_a_policy_is_published_at_the_start_and_when_asked(policy, tmp_path):
    """B059: from the first turn on it is the adapter that serves, never the base behind it."""
    from treadle.models.lora import WEIGHTS_FILE
    from treadle.weights.publish import Publisher

    class Fake(FakeVllm):
        def weights_at(self, folder):
            from safetensors.torch import load_file

            tensors = load_file(f"{folder}/{WEIGHTS_FILE}")
            assert tensors.keys() == policy.parameters().keys()
            return 9

    async def main():
        with Fake() as fake, sampler_of(fake, policy=policy, version=2) as sampler:
            first = await turn(sampler)
            publication = Publisher().publish(policy, sampler, 5)
            second = await turn(sampler, opened=True)
            await until(lambda: len(fake.adapters) == 1)
            exchange = sampler._exchange
            await until(lambda: len(list(exchange.iterdir())) == 1)
            return first, second, publication, exchange

    first, second, publication, exchange = asyncio.run(main())
    assert first.versions == (2,) * 6 and second.versions == (5,) * 6
    assert first.logprobs == pytest.approx(cases.want(PROMPT, first.ids, [9] * 6))
    assert not publication.proven, "a server cannot say what it holds in the policy's terms"
    assert not exchange.exists()


def answered(change):
    """A turn of a server whose answers are changed."""

    class Fake(FakeVllm):
        async def _generate(self, body):
            answer = await super()._generate(body)
            if body["sampling_params"]["max_tokens"] > 1:
                change(answer["choices"][0], answer)
            return answer

    async def main():
        with Fake() as fake, sampler_of(fake) as sampler:
            return await turn(sampler)

    return asyncio.run(main())


def swap_first_logprob(choice, answer):
    choice["logprobs"]["content"][0]["token_id"] += 1


def drop_ids(choice, answer):
    del choice["token_ids"]


def drop_a_logprob(choice, answer):
    choice["logprobs"]["content"].pop()


def mark_missing(choice, answer):
    choice["logprobs"]["content"][2]["logprob"] = -9999.0


def hide_the_stop_id(choice, answer):
    choice["finish_reason"], choice["stop_reason"] = "stop", 77


def change_the_prompt(choice, answer):
    answer["usage"]["prompt_tokens"] += 1


def unknown_weights(choice, answer):
    choice["weight_versions"][0]["version"] = "17"


def gap_in_versions(choice, answer):
    choice["weight_versions"][0]["end"] = 2


def too_many(choice, answer):
    choice["token_ids"] = choice["token_ids"] * 2
    choice["logprobs"]["content"] = choice["logprobs"]["content"] * 2


def half_an_id(choice, answer):
    choice["token_ids"][1] += 0.5


def a_true_id(choice, answer):
    choice["token_ids"][1] = True


def a_negative_id(choice, answer):
    choice["token_ids"][1] = choice["logprobs"]["content"][1]["token_id"] = -1


def a_logprob_in_text(choice, answer):
    choice["logprobs"]["content"][1]["logprob"] = "-1.0"


def a_logprob_that_is_nan(choice, answer):
    choice["logprobs"]["content"][1]["logprob"] = float("nan")


def a_logprob_above_0(choice, answer):
    choice["logprobs"]["content"][1]["logprob"] = 0.1


def cached_more_than_asked(choice, answer):
    answer["usage"]["prompt_tokens_details"] = {"cached_tokens": 4}


def cached_less_than_nothing(choice, answer):
    answer["usage"]["prompt_tokens_details"] = {"cached_tokens": -1}


def cached_in_part(choice, answer):
    answer["usage"]["prompt_tokens_details"] = {"cached_tokens": 1.5}


def a_prompt_of_truth(choice, answer):
    answer["usage"]["prompt_tokens"] = True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (half_an_id, "unknown form: TypeError: expected a whole number"),
        (a_true_id, "expected a whole number, got True"),
        (a_negative_id, "token 1 of 6 has id -1"),
        (a_logprob_in_text, "expected a number, got '-1.0'"),
        (a_logprob_that_is_nan, "token 1 of 6 has logprob nan"),
        (a_logprob_above_0, "token 1 of 6 has logprob 0.1"),
        (cached_more_than_asked, "found 4 tokens in its cache, the prompt has 3"),
        (cached_less_than_nothing, "found -1 tokens in its cache"),
        (cached_in_part, "expected a whole number, got 1.5"),
        (a_prompt_of_truth, "expected a whole number, got True"),
        (swap_first_logprob, "logprob of id"),
        (drop_ids, "no token ids"),
        (drop_a_logprob, "6 ids but 5 logprobs"),
        (mark_missing, "token 2 of 6 has logprob -9999.0"),
        (hide_the_stop_id, "must return the stop id"),
        (change_the_prompt, "continued 4 tokens, the prompt has 3"),
        (unknown_weights, "weights named '17'"),
        (gap_in_versions, "versions for 2 of 6"),
        (too_many, "12 tokens, 6 were allowed"),
    ],
)
def test_an_answer_that_is_not_token_truth_is_refused(change, message):
    with pytest.raises(SamplerError, match=message):
        answered(change)


def test_a_turn_that_the_server_aborted_is_aborted():
    def abort(choice, answer):
        choice["finish_reason"] = "abort"

    assert answered(abort).stop_reason is StopReason.ABORTED


def test_a_busy_server_is_asked_again_and_not_for_ever():
    async def main():
        with FakeVllm() as fake, sampler_of(fake) as sampler:
            fake.refuse["/inference/v1/generate"] = (503, "full")
            asked = len(fake.asked)
            with pytest.raises(SamplerError, match="answered 503: 'full'"):
                await turn(sampler)
            return len(fake.asked) - asked

    assert asyncio.run(main()) == 3


def test_a_server_without_ids_is_refused_when_it_is_opened():
    class Fake(FakeVllm):
        def _choice(self, drawn):
            return super()._choice(drawn) | {"token_ids": None}

    with Fake() as fake, pytest.raises(SamplerError, match="never made from text"):
        sampler_of(fake).start()


def test_a_server_that_a_broken_publication_left_paused_is_refused():
    with FakeVllm() as fake:
        fake.flow(False)
        with pytest.raises(SamplerError, match="is paused"):
            sampler_of(fake).start()


def test_a_connection_that_breaks_after_an_error_does_not_end_the_server(tmp_path):
    """vLLM closes the connection after a failed reload; bringing the old weights back needs a new
    one."""

    class Fake(FakeVllm):
        broken = False

        async def _handle(self, request):
            if request.path == "/collective_rpc" and self.shift == 0 and not self.broken:
                self.broken = True
                request.transport.close()
            return await super()._handle(request)

    async def main():
        with Fake() as fake, sampler_of(fake) as sampler:
            await sampler.adopt(1, weights(tmp_path / "w", 2))
            return fake.broken, await turn(sampler)

    broken, done = asyncio.run(main())
    assert broken and done.versions == (1,) * 6


def test_something_else_behind_the_url_is_refused():
    with FakeVllm() as fake:
        fake.refuse["/v1/models"] = (200, "<html>hello</html>")
        with pytest.raises(SamplerError, match="no JSON object: '<html>hello</html>'"):
            sampler_of(fake).start()
        del fake.refuse["/v1/models"]
        with pytest.raises(SamplerError, match=r"serves .'base'., not `other`"):
            sampler_of(fake, model="other").start()


ANSWER = {
    "choices": [
        {
            "token_ids": [1, 2], "finish_reason": "length", "stop_reason": None,
            "logprobs": {"content": [{"token_id": 1, "logprob": -1}, {"token_id": 2,
                                                                    "logprob": -2}]},
            "weight_versions": [{"version": "0", "start": 0, "end": 2}],
        }
    ],
    "usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}},
}  # fmt: skip


def places(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, each in items:
        yield from places(each, (*path, key))


junk = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5),
    st.lists(st.integers(), max_size=3), st.dictionaries(st.text(max_size=3), st.integers()),
)  # fmt: skip


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(path=st.sampled_from([p for p in places(ANSWER) if p]), value=junk)
def test_any_answer_is_read_or_refused_with_a_typed_error(path, value):
    answer = copy.deepcopy(ANSWER)
    parent = answer
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    sampler = VllmSampler("http://127.0.0.1:9", stop_ids=())
    try:
        drawn = sampler._read(answer, "server")
        done = sampler._completion(drawn, sampler._served, (1, 2, 3), 2)
    except TreadleError:
        return
    assert len(done.ids) == len(done.logprobs) == len(done.versions) <= 2
    assert all(isinstance(i, int) for i in done.ids)


def test_parameters_out_of_range_never_reach_the_server():
    async def main():
        with FakeVllm() as fake, sampler_of(fake) as sampler:
            await sampler.open("s")
            asked = len(fake.asked)
            for bad in ({"temperature": -1.0}, {"top_p": 0.0}, {"max_new_tokens": 0}):
                with pytest.raises(TreadleError, match=next(iter(bad))):
                    await sampler.sample("s", PROMPT, SamplingParams(**{"max_new_tokens": 1} | bad))
            with pytest.raises(SamplerError, match="prompt is empty"):
                await sampler.sample("s", (), SamplingParams(max_new_tokens=1))
            assert len(fake.asked) == asked

    asyncio.run(main())


def test_ids_beyond_the_policys_vocabulary_are_refused_both_ways(policy):
    """Asked for, nothing is sent; drawn, nothing is recorded."""
    vocab = policy.shape.vocab

    class Fake(FakeVllm):
        def weights_at(self, folder):
            return 0

        async def _generate(self, body):
            answer = await super()._generate(body)
            if body["sampling_params"]["max_tokens"] > 1:
                choice = answer["choices"][0]
                choice["token_ids"][1] = choice["logprobs"]["content"][1]["token_id"] = vocab
            return answer

    async def main():
        with Fake() as fake, sampler_of(fake, policy=policy) as sampler:
            await sampler.open("s")
            asked = len(fake.asked)
            with pytest.raises(SamplerError, match=f"id {vocab} at position 1 .* 0..{vocab - 1}"):
                await turn(sampler, prompt=(3, vocab), opened=True)
            with pytest.raises(SamplerError, match=f"id {vocab} at position 1"):
                await sampler.score((3, vocab), 1)
            assert len(fake.asked) == asked
            with pytest.raises(SamplerError, match=f"token 1 of 6 has id {vocab}"):
                await turn(sampler, opened=True)

    asyncio.run(main())


def test_what_vllm_would_change_in_silence_is_refused():
    """It draws at 0.01 what is asked for below, takes seed -1 for none, and has no experts."""

    async def main():
        with FakeVllm() as fake, sampler_of(fake) as sampler:
            with pytest.raises(SamplerError, match=r"at temperature 0.01 what is asked .* 0.001"):
                await turn(sampler, temperature=0.001)
            with pytest.raises(SamplerError, match="choices of experts"):
                await turn(sampler, opened=True, experts="full")
            await turn(sampler, opened=True, temperature=0.01, seed=-1)
            return fake.asked[-1][1]["sampling_params"]["seed"]

    assert asyncio.run(main()) == 2**63 - 1


@pytest.mark.parametrize("score", [float("nan"), 0.5, "-1", True, -9999.0, 10**400])
def test_a_score_that_is_no_logprob_is_refused(score):
    class Fake(FakeVllm):
        def scores(self, prompt, adapter):
            return [*super().scores(prompt, adapter)[:-1], score]

    async def main():
        with Fake() as fake, sampler_of(fake) as sampler:
            assert len(await sampler.score((5, 6, 7), 1)) == 2

    with pytest.raises(SamplerError, match=r"logprob of id 2 of 3|unknown form"):
        asyncio.run(main())


@pytest.mark.parametrize("text", ['{"data": null}', '{"data": 7}', "[" * 100_000])
def test_a_server_that_lists_no_models_is_a_typed_error(text):
    with FakeVllm() as fake:
        fake.refuse["/v1/models"] = (200, text)
        with pytest.raises(SamplerError, match=r"listed no models|no JSON object"):
            sampler_of(fake).start()

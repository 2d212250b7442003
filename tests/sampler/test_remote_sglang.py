"""SglangSampler against a server that speaks the documented protocol."""

import asyncio

import pytest

from tests.sampler import remote_cases as cases
from tests.sampler.remote_cases import PROMPT, turn, until, weights
from treadle.errors import SamplerError
from treadle.sampler.remote import SglangSampler
from treadle.testing import FakeSglang
from treadle.types import Replica


def sampler_of(fake, **options):
    return SglangSampler(fake.url, **{"stop_ids": (), "bos_id": 1} | options)


def plain(**options):
    """A server without streaming sessions."""
    return FakeSglang(streaming=False, **options)


@pytest.mark.parametrize("fake", [FakeSglang, plain], ids=["streaming", "plain"])
@pytest.mark.parametrize("case", cases.CASES, ids=lambda c: c.__name__)
def test_sglang(case, fake):
    case(fake, sampler_of)


@pytest.mark.parametrize("fake", [FakeSglang, plain], ids=["streaming", "plain"])
@pytest.mark.parametrize("case", cases.FOLDER_CASES, ids=lambda c: c.__name__)
def test_sglang_weights(case, fake, tmp_path):
    case(fake, sampler_of, tmp_path)


def test_sglang_that_may_be_half_updated_serves_no_more(tmp_path):
    cases.a_server_that_may_be_half_updated_serves_no_more(
        FakeSglang, sampler_of, tmp_path, "/update_weights_from_disk"
    )


@pytest.mark.parametrize(("fake", "release"), [(FakeSglang, True), (plain, False)])
def test_it_says_what_it_can_do(fake, release):
    with fake() as server, sampler_of(server) as sampler:
        assert isinstance(sampler, Replica)
        assert sampler.capabilities.release is release


def sent(fake):
    return [len(body["input_ids"]) for path, body in fake.asked if path == "/generate"][2:]


def test_a_turn_sends_only_what_is_new_and_release_frees_the_servers_session():
    async def main():
        with FakeSglang() as fake, sampler_of(fake) as sampler:
            prompt, done = PROMPT, await turn(sampler, new=4)
            for i in range(3):
                prompt = (*prompt, *done.ids, 7, 8)
                done = await turn(sampler, prompt=prompt, opened=True, new=4, seed=i)
                assert done.logprobs == pytest.approx(cases.want(prompt, done.ids, [0] * 4))
                assert done.prompt_tokens == len(prompt)
            held = list(fake.sessions.values())
            await sampler.release("s")
            return sent(fake), held, fake.sessions, (*prompt, *done.ids)

    counts, held, after, whole = asyncio.run(main())
    assert counts == [3, 2, 2, 2]
    assert held == [list(whole)] and after == {}


@pytest.mark.parametrize(
    "change",
    [
        lambda p, ids: (9, *p[1:], *ids, 7),  # rewritten history
        lambda p, ids: (*p, *ids[:-1], 7),  # a shortened answer
        lambda p, ids: (*p, *ids),  # nothing new
        lambda p, ids: (*p, *ids, 1, 7),  # the server would drop the BOS id
    ],
)
def test_what_a_session_cannot_continue_begins_a_new_one(change):
    async def main():
        with FakeSglang() as fake, sampler_of(fake) as sampler:
            done = await turn(sampler, new=4)
            prompt = change(PROMPT, done.ids)
            done = await turn(sampler, prompt=prompt, opened=True, new=4)
            return prompt, done, sent(fake), list(fake.sessions.values())

    prompt, done, counts, held = asyncio.run(main())
    assert counts == [3, len(prompt)] and held == [[*prompt, *done.ids]]
    assert done.logprobs == pytest.approx(cases.want(prompt, done.ids, [0] * 4))


def test_newer_weights_begin_a_new_session(tmp_path):
    """B057: KV of older weights serves no new turn."""

    async def main():
        with FakeSglang() as fake, sampler_of(fake) as sampler:
            done = await turn(sampler, new=4)
            await sampler.adopt(1, weights(tmp_path / "w", 2))
            prompt = (*PROMPT, *done.ids, 7)
            await turn(sampler, prompt=prompt, opened=True, new=4)
            return sent(fake), len(fake.sessions)

    assert asyncio.run(main()) == ([3, 8], 1)


def test_a_turn_that_broke_off_leaves_no_session_behind():
    async def main():
        with FakeSglang(delay_s=0.02) as fake, sampler_of(fake) as sampler:
            running = asyncio.ensure_future(turn(sampler, new=50))
            await until(lambda: fake.running == 1)
            running.cancel()
            await until(lambda: not fake.sessions)
            done = await turn(sampler, opened=True, new=4)
            await sampler.release("s")
            return done, fake.sessions

    done, sessions = asyncio.run(main())
    assert len(done.ids) == 4 and sessions == {}


def test_a_dropped_bos_id_is_noticed_by_the_length_of_the_context():
    async def main():
        with FakeSglang() as fake, sampler_of(fake, bos_id=None) as sampler:
            done = await turn(sampler, new=4)
            with pytest.raises(SamplerError, match="continued 8 tokens, the prompt has 9"):
                await turn(sampler, prompt=(*PROMPT, *done.ids, 1, 7), opened=True)
            return fake.sessions

    assert asyncio.run(main()) == {}


def test_original_logprobs_serve_temperature_1_alone():
    async def main():
        with FakeSglang(tempered=False) as fake, sampler_of(fake) as sampler:
            await turn(sampler)
            with pytest.raises(SamplerError, match="SGLANG_RETURN_ORIGINAL_LOGPROB"):
                await turn(sampler, "t", temperature=0.5)

    asyncio.run(main())


def test_load_is_read_from_the_servers_metrics():
    async def main():
        with FakeSglang() as fake, sampler_of(fake) as sampler:
            load = await sampler.load()
            fake.refuse["/metrics"] = (404, "Not Found")
            with pytest.raises(SamplerError, match="--enable-metrics"):
                await sampler.load()
            return load

    load = asyncio.run(main())
    assert (load.running, load.waiting, load.waiting_for_kv, load.kv_usage) == (0, 2, 0, 0.5)
    assert (load.kv_tokens, load.preemptions) == (4096, 1)
    assert (load.prefix_query_tokens, load.prefix_hit_tokens) == (90, 30)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cached_tokens": 4}, "found 4 tokens in its cache, the prompt has 3"),
        ({"cached_tokens": 0.5}, "expected a whole number, got 0.5"),
        ({"prompt_tokens": True}, "expected a whole number, got True"),
        ({"output_token_logprobs": [["-1", 5, None]]}, "expected a number, got '-1'"),
        ({"output_token_logprobs": [[-1.0, 5.0, None]]}, "expected a whole number, got 5.0"),
    ],
)
def test_an_answer_of_other_types_than_numbers_is_refused(change, message):
    class Fake(FakeSglang):
        async def _generate(self, body):
            answer = await super()._generate(body)
            if body["sampling_params"]["max_new_tokens"] > 1:
                del answer["output_ids"]
                answer["meta_info"] |= change
            return answer

    async def main():
        with Fake(streaming=False) as fake, sampler_of(fake) as sampler:
            await turn(sampler)

    with pytest.raises(SamplerError, match=message):
        asyncio.run(main())

"""`treadle sample`: one prompt, or a conversation."""

import io

import pytest

from treadle.cli import sample
from treadle.evals.visible import visible


def test_one_prompt_gives_n_answers_that_depend_on_the_seed_alone(treadle, trained) -> None:
    command = ["sample", trained, "3 + 1 =", "--n", "3", "--json"]
    done = treadle(*command)
    assert done.code == 0
    (model,) = done.json["models"]
    assert (model["model"], model["step"], len(model["answers"])) == ("tiny, step 2", 2, 3)
    assert len({a["answer"] for a in model["answers"]}) > 1
    assert all(a["num_tokens"] <= 6 for a in model["answers"])
    assert treadle(*command).json == done.json
    assert treadle(*command, "--seed", "1").json != done.json
    first = treadle("sample", trained, "3 + 1 =", "--json").json["models"][0]["answers"]
    assert first == model["answers"][:1]


def test_temperature_0_is_greedy(treadle, trained) -> None:
    done = treadle("sample", trained, "hi", "--n", "3", "--temperature", "0", "--json")
    answers = done.json["models"][0]["answers"]
    assert len({a["answer"] for a in answers}) == 1


def test_compare_lets_the_base_answer_first(treadle, trained) -> None:
    done = treadle("sample", trained, "hi", "--compare", "--max-new-tokens", "4", "--json")
    assert [m["step"] for m in done.json["models"]] == [0, 2]
    text = treadle("sample", trained, "hi", "--compare").out
    assert text.count("--- ") == 2


def test_a_conversation_goes_on_over_turns_until_the_input_ends(
    treadle, trained, monkeypatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\nand again\n/reset\nhello\n"))
    done = treadle("sample", trained)
    assert done.code == 0
    answers = done.out.splitlines()
    assert len(answers) >= 3
    assert "(a new conversation)" in done.err
    once = treadle("sample", trained, "hello").out
    assert done.out.startswith(once)
    assert done.out.endswith(once)


def test_a_full_context_is_said_and_the_conversation_can_begin_anew(
    treadle, trained, monkeypatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 200 + "\n/reset\nhello\n"))
    done = treadle("sample", trained)
    assert done.code == 0
    assert "context limit" in done.err
    assert done.out


def test_what_a_model_writes_cannot_control_the_terminal() -> None:
    shown = sample._shown(
        {
            "answer": "a\x1b[2Jb\nc\x9b31m\u202e",
            "reasoning": "",
            "stop_reason": "eos",
            "num_tokens": 4,
        }
    )
    assert shown == "a\\x1b[2Jb\nc\\x9b31m\\u202e"
    assert visible(shown) == shown


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["runs/tiny", "--json"], "about the answers to one PROMPT"),
        (["runs/tiny", "--n", "2"], "about the answers to one PROMPT"),
        (["tiny-random", "hi", "--compare"], "beside its base model"),
        (["runs/gone", "hi"], "there is no run runs/gone"),
    ],
)
def test_mistakes_exit_2(treadle, trained, argv, says) -> None:
    done = treadle("sample", *argv)
    assert done.code == 2
    assert says in done.err


def test_bytes_that_are_no_text_are_answered(treadle, trained, monkeypatch) -> None:
    piped = io.TextIOWrapper(io.BytesIO(b"\xff\xfe\nhello\n"), encoding="utf-8", errors="strict")
    monkeypatch.setattr("sys.stdin", piped)
    done = treadle("sample", trained)
    assert done.code == 0, done.err
    assert treadle("sample", trained, "\udcff").code == 0, "an argument, as the system decodes it"
    assert treadle("sample", trained, "hi", "--system", "\udcff").code == 0

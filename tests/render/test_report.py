"""The start-up check of a chat template, on templates with the quirks of real ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.render.templates import (
    ALL,
    BOS_CHATML,
    CHATML,
    ENDS_WITH_EOS,
    KEEPS_THINKING,
    NO_MARKERS,
    NO_SYSTEM,
    OPENS_THINKING,
    STRICT_CALLS,
    THINKING,
    TOOLS,
    toy_tokenizer,
)
from treadle.errors import ModelError
from treadle.render import Renderer, TemplateReport


def report_of(template: str, eos: str = "<|im_end|>") -> TemplateReport:
    tokenizer = toy_tokenizer(template, eos=eos)
    return Renderer(tokenizer, [tokenizer.eos_token_id]).check()


@pytest.mark.parametrize("template", [CHATML, TOOLS, BOS_CHATML, KEEPS_THINKING, ENDS_WITH_EOS])
def test_the_whole_grid_equals_the_template_where_it_keeps_its_prefix(template: str) -> None:
    """B013: turns 1-4, thinking, tools and system message on and off."""
    report = report_of(template)
    assert len(report.cells) == 32
    assert report.count("stable") == 32
    report.require(tools=True)


def test_cells_that_rewrite_the_past_are_listed_with_the_first_differing_token() -> None:
    """B003, B013"""
    report = report_of(THINKING)
    bad = [c for c in report.cells if c.outcome == "unstable"]
    assert {(c.turns > 1, c.thinking) for c in bad} == {(True, True)}
    assert len(bad) == 12
    assert all(c.token > 0 and "spliced" in c.detail and "template" in c.detail for c in bad)
    assert any("12 unstable" in line or "6 unstable" in line for line in report.lines())
    report.require(tools=True)


def test_roles_that_a_template_refuses_are_unsupported_and_no_failure() -> None:
    report = report_of(NO_SYSTEM)
    assert not report.has_system
    assert report.count("unsupported") == 16
    assert all(c.system for c in report.cells if c.outcome == "unsupported")
    report.require(tools=True)


def test_a_prompt_that_opens_the_thinking_is_never_spliced() -> None:
    """B011: such conversations fork at each user turn."""
    report = report_of(OPENS_THINKING)
    assert report.opens_thinking and report.reasoning == "dropped"
    assert {c.turns for c in report.cells if c.outcome == "stable"} == {1}


def test_a_list_of_json_calls_round_trips() -> None:
    report = report_of(STRICT_CALLS, eos="</s>")
    assert (report.native_tools, report.tool_syntax) == (True, "mistral")


def test_a_call_syntax_that_cannot_be_read_refuses_tools_and_nothing_else() -> None:
    """B014: one call goes through render and parse before a run starts."""
    odd = TOOLS.replace("<tool_call>", "<<call>>").replace('"name": "', '"func": "')
    report = report_of(odd)
    assert report.tool_syntax is None
    report.require()
    with pytest.raises(ModelError, match="cannot be read back"):
        report.require(tools=True)


def test_a_turn_end_that_is_no_stop_id_is_refused() -> None:
    """B019"""
    tokenizer = toy_tokenizer()
    report = Renderer(tokenizer, [tokenizer.convert_tokens_to_ids("<|endoftext|>")]).check()
    assert not report.stops_at_turn_end
    with pytest.raises(ModelError, match="none of the model's stop ids"):
        report.require()


def test_a_turn_that_ends_in_plain_text_is_never_spliced() -> None:
    report = report_of(NO_MARKERS)
    assert {c.turns for c in report.cells if c.outcome == "stable"} == {1}
    report.require()


def test_two_bos_tokens_written_by_the_template_are_refused() -> None:
    """B008"""
    report = report_of("{{ bos_token + bos_token }}" + CHATML)
    assert report.num_bos == 2
    with pytest.raises(ModelError, match="2 BOS tokens"):
        report.require()


def test_the_hash_names_the_template() -> None:
    assert report_of(CHATML).hash == report_of(CHATML).hash != report_of(TOOLS).hash


@pytest.mark.parametrize("name", sorted(ALL))
def test_no_template_looks_stable_and_is_not(name: str) -> None:
    report = report_of(ALL[name], eos="</s>" if name == "strict_calls" else "<|im_end|>")
    assert report.count("wrong") == 0


@pytest.mark.parametrize("name", ["chatml", "tools", "keeps_thinking", "strict_calls"])
def test_word_marks_of_a_tokenizer_appear_where_the_template_has_them(name: str) -> None:
    """A tail encoded alone must not start as if it were the start of a text."""
    eos = "</s>" if name == "strict_calls" else "<|im_end|>"
    tokenizer = toy_tokenizer(ALL[name], eos=eos, word_marks=True)
    report = Renderer(tokenizer, [tokenizer.eos_token_id]).check()
    assert report.count("wrong") == 0
    assert report.count("stable") == report_of(ALL[name], eos).count("stable")


def test_the_template_of_smollm2_is_stable_everywhere() -> None:
    directory = Path.home() / ".cache" / "treadle" / "models" / "smollm2-135m"
    if not (directory / "tokenizer.json").exists():
        pytest.skip(f"{directory} is not there: `treadle models pull smollm2-135m` makes it")
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    report = Renderer(tokenizer, [tokenizer.eos_token_id]).check()
    assert report.count("stable") == 32
    report.require(tools=True)

"""The tiny model: same bits, every text round-trips, the template is prefix-stable."""

import filecmp
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.models import load, tiny

TOKENIZER = tiny.build_tokenizer()


def test_equal_arguments_give_equal_files_and_leave_the_global_generator_alone(tiny_dir, tmp_path):
    before = torch.get_rng_state()
    tiny.build_random(tmp_path / "again")
    tiny.build_random(tmp_path / "other", seed=1)
    assert torch.equal(before, torch.get_rng_state())
    names = sorted(p.name for p in tiny_dir.iterdir())
    match, mismatch, errors = filecmp.cmpfiles(tiny_dir, tmp_path / "again", names, shallow=False)
    assert sorted(match) == names and not mismatch and not errors
    weights = "model.safetensors"
    assert not filecmp.cmp(tiny_dir / weights, tmp_path / "other" / weights, shallow=False)


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_every_text_round_trips(text):
    ids = TOKENIZER(text)["input_ids"]
    assert TOKENIZER.decode(ids) == text


def test_printable_ascii_and_newline_are_one_token_each():
    text = "".join(map(chr, range(32, 127))) + "\n"
    assert len(TOKENIZER(text)["input_ids"]) == len(text)


def test_special_and_marker_tokens_have_their_ids_and_markers_are_ordinary_text():
    assert TOKENIZER("<|endoftext|><|im_start|><|im_end|>")["input_ids"] == [0, 1, 2]
    assert TOKENIZER("<tool_call></tool_call><think></think>")["input_ids"] == [3, 4, 5, 6]
    ids = TOKENIZER("<|im_start|><think>x</think><|im_end|>")["input_ids"]
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "<think>x</think>"


TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TURNS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "2"},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "again"},
    {"role": "assistant", "content": "two"},
]


@pytest.mark.parametrize(
    ("system", "tools", "length"),
    list(itertools.product([False, True], [None, [TOOL]], range(1, 8))),
)
def test_rendering_more_messages_never_changes_what_came_before(system, tools, length):
    messages = [{"role": "system", "content": "Be brief."}] * system + TURNS
    length = min(length + system, len(messages) - 1)

    def render(count: int, prompt: bool) -> str:
        return TOKENIZER.apply_chat_template(
            messages[:count], tools=tools, tokenize=False, add_generation_prompt=prompt
        )

    prompt = messages[length]["role"] == "assistant"
    assert render(length + 1, False).startswith(render(length, prompt))


def test_template_worked_by_hand():
    text = TOKENIZER.apply_chat_template(TURNS[:3], tokenize=False, add_generation_prompt=True)
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert text == (
        "<|im_start|>user\nhi<|im_end|>\n"
        f"<|im_start|>assistant\n<think>hm</think>{call}{call}<|im_end|>\n"
        "<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n"
    )


def test_arguments_may_be_text_or_an_object():
    as_object = {"function": {"name": "add", "arguments": {"a": 1}}}
    texts = [
        TOKENIZER.apply_chat_template(
            [{"role": "assistant", "content": "", "tool_calls": [c]}], tokenize=False
        )
        for c in (CALL, as_object)
    ]
    assert texts[0] == texts[1]


def test_logits_are_neither_flat_nor_one_hot(tiny_dir):
    loaded = load.load(str(tiny_dir), max_context=64)
    with torch.no_grad():
        logits = loaded.module(torch.arange(7, 40)[None]).logits
    assert 1.0 < logits.std() < 4.0


def test_size_arguments_are_honoured(tmp_path):
    tiny.build_random(
        tmp_path, layers=1, hidden=32, heads=2, kv_heads=1, intermediate=48, tied=False
    )
    shape = load.load(str(tmp_path), max_context=32).shape
    assert (shape.layers, shape.hidden, shape.heads, shape.kv_heads) == (1, 32, 2, 1)
    assert (shape.head_dim, shape.intermediate, shape.tied) == (16, 48, False)

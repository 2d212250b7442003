"""Attention over packed forests, against a dense masked softmax."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.errors import ContractError
from treadle.models import attention
from treadle.models.attention import PackedAttend
from treadle.types import Layout, Segment

HEADS, KV_HEADS, DIM = 6, 2, 8


def forest(parents: list[int | None], lengths: list[int]) -> Layout:
    segments, start, ends = [], 0, []
    for parent, length in zip(parents, lengths, strict=True):
        position = 0 if parent is None else ends[parent]
        segments.append(Segment(start, length, parent, position))
        ends.append(position + length)
        start += length
    return Layout(tuple(segments))


@st.composite
def forests(draw) -> Layout:
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=7))
    parents = [
        draw(st.one_of(st.none(), st.integers(0, i - 1))) if i else None
        for i in range(len(lengths))
    ]
    return forest(parents, lengths)


def visible(layout: Layout) -> torch.Tensor:
    """[N, N] bool, True where a row may see a column; straight from the definition."""
    seen = torch.zeros(layout.num_tokens, layout.num_tokens, dtype=torch.bool)
    for i, s in enumerate(layout.segments):
        for t in range(s.length):
            for a in layout.ancestors(i):
                other = layout.segments[a]
                seen[s.start + t, other.start : other.start + other.length] = True
            seen[s.start + t, s.start : s.start + t + 1] = True
    return seen


def dense(layout: Layout, q, k, v, scale):
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~visible(layout), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def random_qkv(tokens: int, seed: int = 0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, h, tokens, DIM, generator=generator, dtype=dtype).requires_grad_()
        for h in (HEADS, KV_HEADS, KV_HEADS)
    ]


def output_and_gradients(attend, qkv, scale=0.3):
    out = attend(0, *qkv, scale)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad((out * weight).sum(), qkv)]


@settings(max_examples=40, deadline=None)
@given(forests(), st.sampled_from([1, 3, 128]), st.sampled_from([1, 600, 1 << 23]))
def test_any_forest_equals_dense_masked_attention_in_value_and_gradient(layout, queries, scores):
    """Reference; every cut into tiles and blocks gives the same."""
    qkv = random_qkv(layout.num_tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "MAX_QUERIES", queries)
        patch.setattr(attention, "MAX_SCORES", scores)
        got = output_and_gradients(PackedAttend(layout), qkv)
    want = output_and_gradients(lambda _, *args: dense(layout, *args), qkv)
    for g, w in zip(got, want, strict=True):
        # The shared keys' gradients are summed in fp32.
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)


def test_the_prefix_gradient_is_the_sum_over_its_children():
    layout = forest([None, 0, 0], [4, 3, 2])
    qkv = random_qkv(9)
    shared = output_and_gradients(PackedAttend(layout), qkv)
    want = output_and_gradients(lambda _, *args: dense(layout, *args), qkv)
    torch.testing.assert_close(shared[2][:, :, :4], want[2][:, :, :4], rtol=1e-5, atol=1e-6)
    assert shared[2][:, :, :4].abs().min() > 0


def test_a_neighbour_tree_is_never_seen():
    """B054: change every token of A; B is unchanged bit for bit."""
    layout = forest([None, 0, 0, None, 3], [5, 4, 2, 3, 6])
    first, second = random_qkv(20), random_qkv(20, seed=1)
    mixed = [
        torch.cat([b[:, :, :11], a[:, :, 11:]], dim=2) for a, b in zip(first, second, strict=True)
    ]
    attend = PackedAttend(layout)
    assert torch.equal(attend(0, *first, 0.3)[:, 11:], attend(0, *mixed, 0.3)[:, 11:])
    assert not torch.equal(attend(0, *first, 0.3)[:, :11], attend(0, *mixed, 0.3)[:, :11])


def test_order_of_trees_and_of_siblings_does_not_matter():
    layout = forest([None, 0, 0, None], [5, 4, 7, 6])
    moved = Layout(
        (
            Segment(0, 6, None, 0),
            Segment(6, 5, None, 0),
            Segment(11, 7, 1, 5),
            Segment(18, 4, 1, 5),
        )
    )
    order = np.r_[16:22, 0:5, 9:16, 5:9]
    qkv = random_qkv(22)
    out = PackedAttend(layout)(0, *qkv, 0.3)
    again = PackedAttend(moved)(0, *(x[:, :, order] for x in qkv), 0.3)
    torch.testing.assert_close(again, out[:, order], rtol=1e-6, atol=1e-7)


def test_positions_continue_the_parent():
    attend = PackedAttend(forest([None, 0, 1, 0], [2, 3, 1, 2]))
    assert attend.positions.tolist() == [[0, 1, 2, 3, 4, 5, 2, 3]]


def test_bfloat16_stays_near_float32():
    layout = forest([None, 0, 0], [40, 30, 20])
    wide = random_qkv(90, dtype=torch.float32)
    narrow = [x.detach().bfloat16().requires_grad_() for x in wide]
    got = output_and_gradients(PackedAttend(layout), narrow)
    want = output_and_gradients(PackedAttend(layout), wide)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == torch.bfloat16
        assert (g.float() - w).norm() < 0.02 * w.norm()


@pytest.mark.parametrize(
    ("segments", "says"),
    [
        ([Segment(1, 2, None, 0)], "expected to start at 0"),
        ([Segment(0, 2, None, 0), Segment(3, 1, 0, 2)], "expected to start at 2"),
        ([Segment(0, 0, None, 0)], "not be empty"),
        ([Segment(0, 2, None, 0), Segment(2, 2, 0, 0)], "its path is 2 long"),
        ([Segment(0, 2, None, 1)], "its path is 0 long"),
        ([Segment(0, 2, 1, 2), Segment(2, 2, None, 0)], "parent 1, which is not before"),
    ],
)
def test_a_layout_that_breaks_its_contract_is_refused(segments, says):
    with pytest.raises(ContractError, match=says):
        PackedAttend(Layout(tuple(segments)))


def test_tokens_that_do_not_fit_the_layout_are_refused():
    with pytest.raises(ContractError, match="layout of 5 tokens"):
        PackedAttend(forest([None], [5]))(0, *random_qkv(4), 1.0)

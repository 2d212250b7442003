"""The page: opens for every run, is self-contained, bounded, and shows text as text."""

import json
import math
import random
import sqlite3
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from tests.evals.eval_runs import (
    FAMILIES,
    PROVENANCE,
    add_eval,
    config,
    node,
    task,
    train,
    trajectory,
)
from tests.evals.eval_runs import whole_run as make_run
from treadle.config import ModelConfig, TasksConfig
from treadle.errors import ErrorRecord, StoreError
from treadle.evals import charts, pieces
from treadle.evals.page import render, write_page
from treadle.evals.samples import MAX_TOKENS
from treadle.evals.visible import one_line, visible
from treadle.store import Store
from treadle.types import Group, Message, Reward, Task, ToolCall

EVIL = (
    "<script>alert(1)</script><img src=x onerror=alert(2)> ]]> --> </pre></style> "
    '" onmouseover="x\' {{ 7*7 }} {% raw %} &amp; \x00\x1b[2J\x9b \u202egnp.exe\u202c \u2066 '
    "\ud800 \u05d0\u05d1 \U0001f469\u200d\U0001f52c"
)


class Reader(HTMLParser):
    """Tags, attributes, ids, targets and text of a page."""

    VOID = frozenset({"meta", "br", "line", "rect", "circle", "polyline", "path", "i"})

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.ids, self.targets, self.text = [], set(), set(), []
        self.attributes = []
        self.open = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        values = dict(attrs)
        if "id" in values:
            assert values["id"] not in self.ids
            self.ids.add(values["id"])
        if "href" in values:
            self.targets.add(values["href"])
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data):
        self.text.append(data)


def read(page):
    found = Reader(page)
    assert found.open == []
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("page") / "run", steps=3)


@pytest.fixture(scope="module")
def page(run):
    with Store.open(run, readonly=True) as store:
        return render(store)


def evil_run(folder):
    """Every text that somebody else wrote is hostile."""
    name = f"toy:{EVIL}".replace("\ud800", "")
    settings = config(name=EVIL.replace("\ud800", ""), tasks=(TasksConfig(source=name),), steps=2)
    of = Task(
        id="<b>id</b>",
        taskset=name,
        messages=(Message(role="user", content=EVIL),),
        data={"answer": EVIL},
    )
    error = ErrorRecord(kind="<i>Kind", where=EVIL, message=EVIL, hint=EVIL, cause=EVIL)
    with Store.create(folder, settings, provenance=PROVENANCE) as store:
        store.start_group(0, of)
        made = [trajectory(0, s, of, 0, answer=EVIL) for s in range(4)]
        last = made[0].nodes[-1]
        said = Message(
            role="assistant",
            content=EVIL,
            reasoning=EVIL,
            tool_calls=(ToolCall(id="1", name=EVIL, arguments=EVIL),),
        )
        made[0] = replace(made[0], nodes=(*made[0].nodes[:-1], replace(last, message=said)))
        made[0] = replace(made[0], reward=Reward(value=0.5, parts={"score": 0.5, '"<u>': 1.0}))
        made[1] = replace(made[1], reward=Reward(value=None, error=error))
        store.drop_group(0, EVIL, Group(ordinal=0, task=of, version=0, trajectories=tuple(made)))
        for step in (0, 2):
            add_eval(store, step, {"<b>id</b>": [(step / 2, 1.0)]}, taskset=name)
            if step == 0:
                train(store, 2)
        store.add_event("alarm", {"step": 1, "message": EVIL})
        store.finish("failed", EVIL)
    return folder


# --------------------------------------------------------------------------- text is text


def test_hostile_text_is_shown_and_never_obeyed(tmp_path):
    evil_run(tmp_path / "run")
    with Store.open(tmp_path / "run", readonly=True) as store:
        write_page(store, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    found = read(page)
    assert not {"script", "img", "iframe", "object", "embed", "base"} & set(found.tags)
    assert not [a for a in found.attributes if a[1].startswith("on")]
    assert all(c in "\n\t" or c.isprintable() or c in "\u200d\u200c" for c in page)
    text = "".join(found.text)
    assert "<script>alert(1)</script>" in text
    assert "\\u202egnp.exe" in text
    assert "\\x1b[2J" in text and "\\ud800" in text
    assert "{{ 7*7 }}" in text and "\n49" not in text
    assert "\u05d0\u05d1" in text and "\U0001f469\u200d\U0001f52c" in text


def test_settings_with_quotes_stay_inside_their_attribute(run, page):
    titles = [v for tag, name, v in read(page).attributes if (tag, name) == ("code", "title")]
    assert json.dumps({"max_new_tokens": 24}) in titles


def test_what_does_not_print_is_spelled_out():
    assert visible("a\x00b\x7f\u200f\n\tc\u00a0d") == "a\\x00b\\x7f\\u200f\n\tc\u00a0d"
    assert one_line("a\r\n b\x1b" + "x" * 50, 10) == "a b\\x1bxx\u2026"


# --------------------------------------------------------------------------- one file


def test_the_page_asks_nobody_for_anything(page):
    found = read(page)
    assert all(target.startswith("#") for target in found.targets)
    assert not [a for a in found.attributes if a[1] in ("src", "srcset", "data", "action")]
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style and "@import" not in style
    assert "default-src 'none'" in page
    assert "prefers-color-scheme: dark" in page and "width=device-width" in page


def test_every_cell_of_the_grid_leads_to_a_trajectory_that_is_there(page):
    """B150: in a short run every trajectory opens from the grid, with ids, logprob and version."""
    found = read(page)
    cells = {t for t in found.targets if t.startswith("#t-")}
    assert len(cells) > 20
    assert {t[1:] for t in cells} <= found.ids
    tips = [v for _, name, v in found.attributes if name == "data-h"]
    assert any("logprob" in t and "version 2" in t and "not trained" not in t for t in tips)
    assert any("observed: not trained" in t for t in tips)


def test_before_after_curves_and_definitions_are_on_the_page(page):
    text = " ".join("".join(read(page).text).split())
    for part in (
        "mean of 2 task sets",
        "strict gain",
        "training reward",
        "entropy of the policy",
        "sampled tokens per trajectory",
        "k3 nats",
        "lag, versions",
        "Where the strict rate rose most",
        "mean k3 estimate of KL(behaviour || policy)",
        "all rewards are equal",
        "licence apache-2.0",
    ):
        assert part in text, part


# --------------------------------------------------------------------------- every run


def test_a_run_that_has_not_begun_says_so(tmp_path):
    """B151."""
    with Store.create(tmp_path / "run", config(), provenance={}) as store:
        text = "".join(read(render(store)).text)
    assert "No step is committed yet. Status: running" in text
    assert "No group is stored yet" in text
    assert "No metric is stored yet" in text


def test_a_failed_run_shows_its_cause_and_what_it_generated(tmp_path):
    with Store.create(tmp_path / "run", config(), provenance=PROVENANCE) as store:
        of = task(FAMILIES[0], 0)
        store.start_group(0, of)
        group = tuple(trajectory(0, s, of, 0) for s in range(4))
        store.publish_group(Group(ordinal=0, task=of, version=0, trajectories=group))
        store.finish("failed", "the disk is full\nhint: free space")
        found = read(render(store))
    text = "".join(found.text)
    assert "the run failed; 0 of 3 steps are done: the disk is full" in text
    assert "1 wait for a step" in text
    assert {"t-0-0", "t-0-3"} <= found.ids


def test_a_damaged_trajectory_is_shown_as_missing_and_the_rest_is_there(tmp_path):
    """B150: missing shards shown as missing."""
    run = make_run(tmp_path / "run", steps=2)
    db = sqlite3.connect(run / "run.db")
    db.execute("UPDATE trajectories SET data = x'00112233' WHERE id = '0/1'")
    db.commit()
    db.close()
    with Store.open(run, readonly=True) as store:
        found = read(render(store))
    assert "This trajectory is missing" in "".join(found.text)
    assert {"t-0-0", "t-0-1"} <= found.ids


def test_a_huge_run_gives_a_bounded_page(tmp_path):
    """One trajectory of 60,000 tokens and 400 turns, a group of 100, 400 steps of metrics."""
    rng = random.Random(0)
    settings = config(steps=400)
    with Store.create(tmp_path / "run", settings, provenance=PROVENANCE) as store:
        of = task(FAMILIES[0], 0)
        store.start_group(0, of)
        long = "word " * 12_000
        big = trajectory(0, 0, of, 0)
        nodes = (*big.nodes[:2], node(2, long, 0, rng))
        many = tuple(node(i, f"turn {i} " * 9, 0 if i % 2 else None, rng) for i in range(400))
        group = [replace(big, nodes=nodes), replace(trajectory(0, 1, of, 0), nodes=many)]
        group += [trajectory(0, s, of, 0) for s in range(2, 100)]
        store.publish_group(Group(ordinal=0, task=of, version=0, trajectories=tuple(group)))
        for step in range(1, 401):
            ordinals = [0] if step == 1 else []
            values = {"reward/mean": step / 400, "policy/entropy_nats": math.exp(-step / 50)}
            store.commit_step(step, version=step, ordinals=ordinals, samples=[], metrics=values)
        page = render(store)
    found = read(page)
    assert len(page) < 4_000_000
    assert found.tags.count("b") <= MAX_TOKENS + 500
    assert "steps 397 to 400" in page
    assert "turns in the middle are not shown" in page


def test_a_page_that_cannot_be_written_is_an_error_and_leaves_nothing(run, tmp_path):
    (tmp_path / "file").write_text("")
    with (
        Store.open(run, readonly=True) as store,
        pytest.raises(StoreError, match="cannot write the page") as caught,
    ):
        write_page(store, tmp_path / "file" / "page.html")
    assert caught.value.hint
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_the_same_run_gives_the_same_page(run, page):
    with Store.open(run, readonly=True) as store:
        assert render(store) == page


# --------------------------------------------------------------------------- parts


def toy_tokenizer(folder):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.save(str(folder / "tokenizer.json"))
    return raw


def test_tokens_are_shown_as_text_where_the_tokenizer_fits_the_stored_text(tmp_path):
    ids = toy_tokenizer(tmp_path).encode("a b\u00e9").ids
    read_ids = pieces.pieces_of(str(tmp_path))
    assert read_ids(ids, "a b\u00e9") == ["a", " ", "b", "", "\u00e9"]
    assert read_ids(ids, "another text") is None
    assert read_ids([10**12], "") is None
    assert pieces.pieces_of(str(tmp_path / "nowhere"))(ids, "a") is None


def test_a_page_shows_text_instead_of_ids_when_it_can(tmp_path):
    tokenizer = toy_tokenizer(tmp_path)
    settings = config(model=ModelConfig(name=str(tmp_path)))
    with Store.create(tmp_path / "run", settings, provenance=PROVENANCE) as store:
        of = task(FAMILIES[0], 0)
        store.start_group(0, of)
        made = trajectory(0, 0, of, 0, answer="Zebra!")
        last = replace(made.nodes[-1], ids=tuple(tokenizer.encode("Zebra!").ids))
        made = replace(made, nodes=(*made.nodes[:-1], last))
        store.publish_group(Group(ordinal=0, task=of, version=0, trajectories=(made,)))
        page = render(store)
    assert ">Z</b><b" in page and ">!</b>" in page


def test_ticks_are_round_and_hold_the_values_and_zero():
    assert charts.nice_ticks([0.0, 1.0]) == [0, 0.25, 0.5, 0.75, 1.0]
    assert charts.nice_ticks([0.0]) == [0, 0.25, 0.5, 0.75, 1.0]
    for values in ([3e-9, 2e-9], [-7.0, 12.0], [1e12], [0.31, 0.32]):
        ticks = charts.nice_ticks(values)
        assert ticks[0] <= min(0.0, *values) and ticks[-1] >= max(values)
        assert 2 <= len(ticks) <= 7


def test_a_gap_in_the_data_is_a_gap_in_the_line():
    steps = list(range(1, 21))
    values = [1.0] * 5 + [None] * 5 + [2.0] + [None] + [1.0] * 8
    drawn = charts.chart(
        "t", "", steps, [charts.Series(label="a", color="blue", values=values)], skipped=[]
    )
    assert drawn is not None
    assert len(drawn.lines[0].paths) == 2
    assert len(drawn.lines[0].dots) == 1
    assert charts.chart("t", "", steps, []) is None

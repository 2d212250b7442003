"""A name becomes a directory, or an error that says what to type."""

import shutil

import pytest

from treadle.errors import ModelError
from treadle.models import cache, catalog, files, hub


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def hub_cache(monkeypatch, tmp_path):
    """An empty hub cache; the library reads its place once, when it is imported."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def put_in_hub_cache(hub_cache, tiny_dir, hub_id: str):
    root = hub_cache / ("models--" + hub_id.replace("/", "--"))
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("abc123")
    return shutil.copytree(tiny_dir, root / "snapshots" / "abc123")


def refused(name: str) -> ModelError:
    with pytest.raises(ModelError) as caught:
        catalog.resolve(name)
    return caught.value


def test_a_known_model_that_is_not_here_names_the_command(own_cache, hub_cache):
    error = refused("smollm2-135m")
    assert error.hint == "treadle models pull smollm2-135m"
    assert str(own_cache) in error.message


def test_a_known_model_is_found_in_our_cache_and_then_in_the_hubs(own_cache, hub_cache, tiny_dir):
    model = catalog.KNOWN["smollm2-135m"]
    snapshot = put_in_hub_cache(hub_cache, tiny_dir, model.hub_id)
    assert catalog.resolve(model.name) == snapshot
    ours = cache.install(
        model.name,
        lambda d: shutil.copytree(tiny_dir, d, dirs_exist_ok=True),
        recipe="",
        provenance=catalog.Provenance(source="", license=""),
    )
    assert catalog.resolve(model.name) == ours


def test_an_incomplete_snapshot_of_the_hub_does_not_count(own_cache, hub_cache, tiny_dir):
    snapshot = put_in_hub_cache(hub_cache, tiny_dir, "org/name")
    assert catalog.resolve("org/name") == snapshot
    (snapshot / "model.safetensors").unlink()
    assert hub.cached("org/name") is None
    assert "hub cannot be reached" in refused("org/name").message


def test_a_local_directory_is_taken_as_it_is(tiny_dir, monkeypatch):
    assert catalog.resolve(str(tiny_dir)) == tiny_dir
    monkeypatch.chdir(tiny_dir.parent)
    assert catalog.resolve(f"./{tiny_dir.name}") == tiny_dir


def test_tiny_random_is_made_on_first_use(own_cache):
    path = catalog.resolve("tiny-random")
    assert path == own_cache / "tiny-random" and files.is_complete(path)
    made = (path / "treadle.json").stat().st_ino
    assert catalog.resolve("tiny-random") == path
    assert (path / "treadle.json").stat().st_ino == made


def test_tiny_random_of_another_recipe_is_made_anew(own_cache, monkeypatch):
    from treadle.models import tiny

    catalog.resolve("tiny-random")
    monkeypatch.setattr(tiny, "RECIPE", "tiny-next")
    assert cache.record(catalog.resolve("tiny-random"))["recipe"] == "tiny-next"


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("smolm2-135m", "smollm2-135m"),
        ("SmolLM2-135M-Instruct", "smollm2-135m"),
        ("qwen3-06b", "qwen3-0.6b"),
        ("tiny-randm", "tiny-random"),
    ],
)
def test_a_misspelt_name_is_answered_with_the_nearest(own_cache, name, suggestion):
    error = refused(name)
    assert f"unknown model `{name}`" in error.message
    assert f"`{suggestion}`" in error.hint


def test_a_name_near_nothing_lists_the_known_ones(own_cache):
    assert all(name in refused("zzzzzzzz").hint for name in catalog.KNOWN)


def test_a_missing_directory_suggests_its_neighbours(own_cache, tiny_dir):
    error = refused(str(tiny_dir) + "x")
    assert "no such model directory" in error.message and f"`{tiny_dir.name}`" in error.hint
    assert "does not exist either" in refused("/no/such/place").hint


def test_a_file_is_not_a_model(own_cache, tiny_dir):
    error = refused(str(tiny_dir / "model.safetensors"))
    assert "is a file" in error.message and str(tiny_dir) in error.hint


def test_a_hub_id_without_a_hub_says_where_it_was_looked_for(own_cache, hub_cache):
    error = refused("org/unknown")
    assert "no directory here" in error.message and "HF_HUB_OFFLINE is set" in error.message
    error = refused("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert "treadle models pull smollm2-135m" in error.hint


def test_an_unreachable_hub_gives_its_reason(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "127.0.0.1:9" in hub.why_unreachable(timeout_s=1.0)


def test_listing_shows_what_is_here_with_size_license_and_source(own_cache, hub_cache, tiny_dir):
    catalog.resolve("tiny-random")
    put_in_hub_cache(hub_cache, tiny_dir, "Qwen/Qwen3-0.6B")
    cache.install(
        "my-own",
        lambda d: shutil.copytree(tiny_dir, d, dirs_exist_ok=True),
        recipe="",
        provenance=catalog.Provenance(source="me", license="MIT"),
    )
    rows = {row.name: row for row in catalog.listing()}
    assert set(catalog.KNOWN) < set(rows)
    tiny = rows["tiny-random"]
    assert tiny.present and tiny.bytes > 300_000 and tiny.source == "built by treadle.models.tiny"
    assert rows["qwen3-0.6b"].source == "hf:Qwen/Qwen3-0.6B@abc123"
    assert (rows["my-own"].license, rows["my-own"].source) == ("MIT", "me")
    absent = rows["smollm2-135m"]
    assert not absent.present and absent.bytes == 0 and absent.license == "Apache-2.0"


def test_listing_an_empty_machine_works(own_cache, hub_cache):
    assert not any(row.present for row in catalog.listing())


def test_known_parameter_counts_of_local_models_are_right(own_cache):
    from treadle.models import load

    shape = load.load("tiny-random", max_context=64).shape
    assert shape.parameters == catalog.KNOWN["tiny-random"].parameters

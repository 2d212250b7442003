"""The model cache: a model is there whole or not at all."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest

from treadle.errors import ModelError
from treadle.models import cache, files
from treadle.types import Provenance

SOURCE = Provenance(source="a test", license="MIT")


@pytest.fixture
def build(tiny_dir):
    return lambda directory: shutil.copytree(tiny_dir, directory, dirs_exist_ok=True)


def test_an_installed_model_carries_its_source_license_and_digests(own_cache, build):
    path = cache.install("m", build, recipe="r1", provenance=SOURCE, detail={"hub": "no"})
    assert path == own_cache / "m" == cache.installed("m") == cache.installed("m", "r1")
    record = json.loads((path / "treadle.json").read_text())
    digest = files.sha256(path / "model.safetensors")
    assert record == {
        "source": "a test",
        "license": "MIT",
        "recipe": "r1",
        "sha256": digest,
        "weights_sha256": digest,
        "hub": "no",
    }


def test_a_second_install_does_nothing(own_cache, build):
    cache.install("m", build, recipe="r1", provenance=SOURCE)
    before = (own_cache / "m" / "treadle.json").stat().st_ino

    def never(directory):
        raise AssertionError("built twice")

    cache.install("m", never, recipe="r1", provenance=SOURCE)
    assert (own_cache / "m" / "treadle.json").stat().st_ino == before


def test_another_recipe_replaces_the_model_and_keeps_it_until_then(own_cache, build):
    cache.install("m", build, recipe="r1", provenance=SOURCE)
    assert cache.installed("m", "r2") is None

    def fails(directory):
        raise ModelError("no")

    with pytest.raises(ModelError, match="no"):
        cache.install("m", fails, recipe="r2", provenance=SOURCE)
    assert cache.installed("m", "r1")
    cache.install("m", build, recipe="r2", provenance=SOURCE)
    assert cache.installed("m", "r2") and not cache.installed("m", "r1")
    assert sorted(p.name for p in own_cache.iterdir()) == [".m.lock", "m"]


def test_a_directory_without_a_record_or_weights_does_not_count(own_cache, build):
    path = cache.install("m", build, recipe="r", provenance=SOURCE)
    (path / "treadle.json").rename(path / "other")
    assert cache.installed("m") is None
    (path / "other").rename(path / "treadle.json")
    (path / "model.safetensors").unlink()
    assert cache.installed("m") is None


def test_a_failed_build_leaves_nothing(own_cache):
    def half(directory):
        (directory / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.install("m", half, recipe="r", provenance=SOURCE)
    assert [p.name for p in own_cache.iterdir()] == [".m.lock"]


def test_an_incomplete_build_is_refused_and_lists_what_it_made(own_cache):
    with pytest.raises(ModelError, match=r"incomplete model: config\.json"):
        cache.install("m", lambda d: (d / "config.json").touch(), recipe="r", provenance=SOURCE)
    assert cache.installed("m") is None


def test_a_process_killed_while_building_leaves_no_model_and_the_next_cleans_up(own_cache, build):
    code = (
        "import os, signal\nfrom treadle.models import cache\n"
        "from treadle.types import Provenance\n"
        "def build(d):\n"
        "    (d / 'config.json').write_text('{}'); (d / 'model.safetensors').write_text('x')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "cache.install('m', build, recipe='r', provenance=Provenance(source='', license=''))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=dict(os.environ), timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert len(list(own_cache.glob(".m.*.part"))) == 1
    assert cache.installed("m") is None
    cache.install("m", build, recipe="r", provenance=SOURCE)
    assert sorted(p.name for p in own_cache.iterdir()) == [".m.lock", "m"]


def test_two_installers_at_once_build_once(own_cache, build):
    built = []
    both_wait = threading.Barrier(2, timeout=30)

    def counted(directory):
        built.append(directory)
        build(directory)

    def work():
        both_wait.wait()
        cache.install("m", counted, recipe="r", provenance=SOURCE)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1 and cache.installed("m", "r")


def test_waiting_for_another_installer_has_a_bound(own_cache, build, monkeypatch):
    monkeypatch.setattr(cache, "LOCK_WAIT_S", 0.0)
    own_cache.mkdir(parents=True)
    with (
        cache._lock(own_cache / ".m.lock", "m"),
        pytest.raises(ModelError, match="another process has been making m") as caught,
    ):
        cache.install("m", build, recipe="r", provenance=SOURCE)
    assert ".m.lock" in caught.value.hint


def test_too_little_disk_is_refused_before_anything_is_written(own_cache):
    def never(directory):
        raise AssertionError("built")

    with pytest.raises(ModelError, match=r"GB free, 1000000000\.00 GB needed") as caught:
        cache.install("m", never, recipe="r", provenance=SOURCE, need_bytes=10**18)
    assert "TREADLE_CACHE" in caught.value.hint


@pytest.mark.parametrize(
    ("number", "message"),
    [(errno.ENOSPC, "the disk is full"), (errno.EACCES, "Permission denied")],
)
def test_a_disk_error_during_the_build_is_told_and_leaves_nothing(own_cache, number, message):
    def full(directory):
        (directory / "config.json").write_text("{}")
        raise OSError(number, os.strerror(number))

    with pytest.raises(ModelError, match=message) as caught:
        cache.install("m", full, recipe="r", provenance=SOURCE)
    assert "TREADLE_CACHE" in caught.value.hint
    assert [p.name for p in own_cache.iterdir()] == [".m.lock"]


def test_a_cache_that_cannot_be_made_is_told(monkeypatch, tmp_path, build):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError) as caught:
        cache.install("m", build, recipe="r", provenance=SOURCE)
    assert "TREADLE_CACHE" in caught.value.hint

"""Free memory that malloc keeps is given back when it has grown."""

from __future__ import annotations

import subprocess
import sys

import pytest

from treadle.machine import facts

CODE = """
import ctypes
from treadle import machine
machine.tune()
from treadle.machine import Heap, rss_bytes
heap = Heap(slack_bytes=64 << 20)
heap.release()
level = rss_bytes()
assert heap.release() == 0, "nothing has grown"
# Small blocks with survivors on top: what malloc cannot give back by itself.
blocks = [ctypes.create_string_buffer(1 << 20) for _ in range(256)]
kept = blocks[::16]
del blocks
grown = rss_bytes()
assert grown - level > 200 << 20, grown - level
given = heap.release()
assert given > 150 << 20, given
assert rss_bytes() - level < 64 << 20
assert all(len(b.raw) == 1 << 20 for b in kept)
"""


@pytest.mark.skipif(not facts().libc.startswith("glibc"), reason="only glibc gives memory back")
def test_fragments_are_given_back_once_they_have_grown_beyond_the_slack() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=120)

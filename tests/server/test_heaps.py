"""A server's threads share few heaps of the C library."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from jpaged.server.heaps import MOST_HEAPS

HEAPS = """
import ctypes, sys, threading
from jpaged.server.heaps import limit_heaps

asked = limit_heaps() if sys.argv[1] == "limited" else None
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
together = threading.Barrier(12)

def allocate():
    together.wait()
    libc.malloc(100)
    together.wait()  # no thread's heap is free for another before all have one

threads = [threading.Thread(target=allocate) for _ in range(12)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc.fopen.restype = ctypes.c_void_p
out = libc.fopen(sys.argv[2].encode(), b"w")
libc.malloc_info(0, ctypes.c_void_p(out))
libc.fclose(ctypes.c_void_p(out))
print(asked, open(sys.argv[2]).read().count("<heap nr="))
"""


def heaps(mode, folder, **environment):
    """Return `limit_heaps`'s answer in a process of its own, and the heaps of 12 threads that allocate at once."""
    given = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"} | environment
    command = [sys.executable, "-c", HEAPS, mode, str(folder / "heaps.xml")]
    asked, number = subprocess.run(command, env=given, capture_output=True, text=True, check=True).stdout.split()
    return asked, int(number)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such heaps")
def test_threads_share_few_heaps_unless_the_environment_says_another_number(tmp_path):
    assert heaps("plain", tmp_path)[1] > MOST_HEAPS
    asked, number = heaps("limited", tmp_path)
    assert asked == "True" and number <= MOST_HEAPS
    assert heaps("limited", tmp_path, MALLOC_ARENA_MAX="2") == ("False", 2)

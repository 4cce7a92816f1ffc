"""A process that a library aborts tells first which process it has lost; an abort for any other reason ends it."""

import signal
import subprocess
import sys

PROGRAM = """
import ctypes, threading
from jpaged.distributed import watch
watch.NEWS_SECONDS = 1.0
run = watch.Watch()
threading.Thread(target=ctypes.CDLL(None).abort, daemon=True).start()
if {lost}:
    threading.Timer(0.3, run.lose, ["process 0 is gone"]).start()
run.fetch(threading.Event().wait)
"""
WAITS = """
import jax
jax.device_get = lambda wait: wait()
"""


def end_of(lost):
    program = WAITS + PROGRAM.format(lost=lost)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


def test_an_abort_waits_for_the_loss_that_explains_it():
    ended = end_of(True)
    assert ended.returncode == 1 and "ProcessLost: process 0 is gone" in ended.stderr


def test_an_abort_that_no_loss_explains_ends_the_process():
    assert end_of(False).returncode == -signal.SIGABRT

"""What a run of the tests shares with the next run and with the worker beside it.

Variables are set before anything imports jax or torch, for subprocesses too.
"""

import os
import signal
from collections.abc import Generator
from pathlib import Path

import platformdirs
import pytest
import thorough
from reports import encodable

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(platformdirs.user_cache_dir("jpaged")) / "xla-tests"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Threads of OpenMP wait for each other by spinning, which takes the core from the other worker.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts a job in the background so, and tests send the signal to themselves.
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONG_ROOMS = ("aot", "engine", "distributed", "models", "execution")
"""Rooms with files that run for a minute or more, the longest first."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--nightly", action="store_true", help="run what is marked nightly too, on three times the examples"
    )


def pytest_configure(config: pytest.Config) -> None:
    thorough.NIGHTLY = config.getoption("--nightly")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let what a test printed not end the run of all."""
    report = yield
    return encodable(report)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is nightly, and put long files first where workers share them, so that none ends with a long one
    while the other has nothing."""
    if not thorough.NIGHTLY:
        later = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=later)
        items[:] = [item for item in items if item not in set(later)]
    if not hasattr(config, "workerinput"):
        return
    here = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        room = item.path.relative_to(here).parts[0]
        return LONG_ROOMS.index(room) if room in LONG_ROOMS else len(LONG_ROOMS)

    items.sort(key=place)

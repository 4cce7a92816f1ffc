"""What a run of the tests shares with the next run and with the worker beside it.

Variables are set before anything imports jax or torch, for subprocesses too.
"""

import gc
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import hypothesis
import platformdirs
import pytest
import thorough
from lost_workers import LastWords, LostWorkers
from process_memory import Released
from reports import encodable
from silence import Silence

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(platformdirs.user_cache_dir("jpaged")) / "xla-tests"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
if "--nightly" not in sys.argv and "PYTEST_XDIST_WORKER" not in os.environ:
    # Most of a run is XLA compiling programs that run for milliseconds. The night's are optimised as users' are.
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    os.environ["XLA_FLAGS"] = " ".join(filter(None, [os.environ.get("XLA_FLAGS"), *thorough.quick_compiler_flags()]))
os.environ.setdefault("PALLAS_KERNELS_GPU", "triton")  # what is compiled and planned for GPUs here; not the default
if "PYTEST_XDIST_WORKER" in os.environ:
    # Threads of OpenMP wait for each other by spinning, which takes the core from the other worker.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts a job in the background so, and tests send the signal to themselves.
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONG = (
    "engine/test_engine_families.py",
    "server/test_schema_cases.py",
    "integrations/ray/test_replicas.py",
    "distributed/test_several_processes.py",
    "planning/test_programs_for.py",
    "scripts/test_notebooks.py",
    "aot",
    "engine",
    "pallas_kernels",
    "execution",
    "models",
    "server",
    "loading",
    "training",
    "contract",
)
"""Files and rooms that take longest, in the order in which they begin: a long file at the end leaves a core idle."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--nightly", action="store_true", help="run what is marked nightly too, on three times the examples"
    )


@pytest.hookimpl(trylast=True)  # when the terminal's reporter is there
def pytest_configure(config: pytest.Config) -> None:
    thorough.NIGHTLY = config.getoption("--nightly")
    of_run = {"parent": hypothesis.settings.default, "max_examples": thorough.examples(100)}
    hypothesis.settings.register_profile("of properties that say no number", **of_run)
    hypothesis.settings.load_profile("of properties that say no number")
    reporter = config.pluginmanager.getplugin("terminalreporter")
    plugins = config.pluginmanager
    plugins.register(Released(), "released")
    if hasattr(config, "workerinput"):
        plugins.register(LastWords(config.workerinput["last_words"]), "last words")
    else:
        plugins.register(LostWorkers(config), "lost workers")
        if reporter is not None:
            plugins.register(Silence(reporter), "silence")


@pytest.fixture(autouse=True)
def own_log() -> Generator[None]:
    """Take away the log that a server configures in the process: it writes to a file that is closed after the test."""
    root, jpaged = logging.getLogger(), logging.getLogger("jpaged")
    handlers, level, root_level = list(root.handlers), jpaged.level, root.level
    yield
    for handler in root.handlers[:]:
        if handler not in handlers and type(handler) is logging.StreamHandler:
            root.removeHandler(handler)
            root.setLevel(root_level)
            jpaged.setLevel(level)


@pytest.fixture(autouse=True)
def optimised_for_hardware(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is compiled for other hardware be optimised on a commit too: tests count its instructions and bytes."""
    if request.node.get_closest_marker("aot"):
        monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS", raising=False)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do the work of a plan's child here, where one device will do: a process takes seconds to start."""
    from jpaged.planning.compile_step import answer

    def run(command: list[str], *, input: str, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, json.dumps(answer(json.loads(input))), "")

    monkeypatch.setattr("jpaged.planning.child_process.subprocess.run", run)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let what a test printed not end the run of all."""
    report = yield
    return encodable(report)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave what is imported and collected, millions of objects, to no garbage collection.

    Scans of them took a fifth of the time until the first test, and each later one would take half a second. Afterwards
    the youngest are scanned every 10,000 objects instead of 700: tracing makes many, and half of the time goes.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000, 20, 20)
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -m looks at markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is nightly, and put long files first where workers share them, so that none ends with a long one
    while the other has nothing."""
    listed = thorough.for_the_night()
    for item in items:
        if item.nodeid in listed:
            item.add_marker("nightly")
    if not thorough.NIGHTLY:
        later = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=later)
        items[:] = [item for item in items if item not in set(later)]
    if not hasattr(config, "workerinput"):
        return
    here = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        path = item.path.relative_to(here)
        return next((LONG.index(name) for name in (path.as_posix(), path.parts[0]) if name in LONG), len(LONG))

    items.sort(key=place)

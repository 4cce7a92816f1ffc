"""Compiling in the background: in order, once, to the end or until it is stopped, whatever fails."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from jpaged.engine.compilation import LONGEST_REST, BackgroundCompiler
from jpaged.execution.compile.program import Compilations
from jpaged.execution.shapes import Shape

SCRIPT = """
import sys
import threading
import time
from jpaged.engine.compilation import BackgroundCompiler
from jpaged.execution.compile.program import Compilations
from jpaged.execution.shapes import Shape

begun = threading.Event()

def compiles(number):
    sys.stdout.write(f"compiled {number}\\n")
    begun.set()

def trace(number):
    while number and threading.main_thread().is_alive():
        time.sleep(0.01)  # until the program's end has come
    return lambda: compiles(number)

shapes = [Shape(str(number), lambda number=number: trace(number)) for number in range(100)]
BackgroundCompiler(shapes, Compilations(), lambda: False).start()
begun.wait()
sys.stdout.write("the program ends\\n")
"""


class Shapes:
    """Makes shapes that tell what becomes of them, and can be held up."""

    def __init__(self) -> None:
        self.compilations = Compilations()
        self.compiled: list[str] = []
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.go_on.set()

    def __call__(self, *names: str, tracing: str = "", compiling: str = "") -> list[Shape]:
        """Return shapes of these names, of which one cannot be traced and one not compiled."""

        def shape(name: str) -> Shape:
            def compile_it() -> None:
                self.begun.release()
                assert self.go_on.wait(60)
                if name == compiling:
                    raise RuntimeError(f"{name} does not fit")
                self.compiled.append(name)

            def trace():
                self.compilations.begin(name)
                self.compilations.end(name, 0.0)
                if name == tracing:
                    raise ValueError(f"{name} has no kernel")
                return compile_it

            return Shape(name, trace)

        return [shape(name) for name in names]


@pytest.fixture
def shapes():
    return Shapes()


def ended(background: BackgroundCompiler) -> None:
    background.wait(60)
    assert not background.is_running


def test_shapes_are_compiled_in_order_and_counted(shapes, caplog):
    background = BackgroundCompiler(shapes("a", "b", "c"), shapes.compilations, lambda: True)
    with caplog.at_level(logging.INFO, "jpaged"):
        background.start()
        ended(background)
    counts = shapes.compilations
    assert shapes.compiled == ["a", "b", "c"]
    assert (counts.num_in_background, counts.num_to_come, counts.warm) == (3, 0, True)
    assert "compiled 3 shapes in the background" in caplog.text
    counts.begin("d")
    assert counts.num_in_background == 3 and counts.num_recompiles == 1


def test_the_shape_that_most_steps_lack_is_compiled_next(shapes):
    made = shapes("a", "b", "c", "d")
    shapes.go_on.clear()
    background = BackgroundCompiler(made, shapes.compilations, lambda: False)
    background.start()
    assert shapes.begun.acquire(timeout=60)
    for name in ("c", "d", "d", "of no use"):
        shapes.compilations.lacked(name)
    shapes.go_on.set()
    ended(background)
    assert shapes.compiled == ["a", "d", "c", "b"] and shapes.compilations.num_padded == 4


class Clock:
    """A clock that goes on where a shape is traced and where the compiler rests."""

    def __init__(self) -> None:
        self.now = 0.0
        self.rested = 0.0

    def __call__(self) -> float:
        return self.now

    def rest(self, seconds: float) -> None:
        self.now += seconds
        self.rested += seconds

    def slow(self, shape: Shape, seconds: float) -> Shape:
        def trace():
            self.now += seconds
            return shape.trace()

        return Shape(shape.name, trace)


@pytest.fixture
def clock():
    return Clock()


def test_it_rests_while_requests_run_for_as_long_as_each_shape_took(shapes, clock):
    made = [clock.slow(shape, seconds) for shape, seconds in zip(shapes("a", "b", "c"), (50, 3, 1), strict=True)]
    background = BackgroundCompiler(made, shapes.compilations, lambda: True, clock=clock)
    background.stopping.wait = clock.rest
    background.start()
    ended(background)
    assert shapes.compiled == ["a", "b", "c"]
    assert clock.rested == pytest.approx(LONGEST_REST + 3), (
        "half of the time is left to steps, and the last shape ends it"
    )


def test_it_rests_no_longer_than_requests_run(shapes, clock):
    looks = iter([True, True, False, False])
    made = [clock.slow(shape, 1000.0) for shape in shapes("a", "b", "c")]
    background = BackgroundCompiler(made, shapes.compilations, lambda: next(looks), clock=clock)
    background.stopping.wait = clock.rest
    background.start()
    ended(background)
    assert shapes.compiled == ["a", "b", "c"] and next(looks, None) is None
    assert clock.rested < 1.0


def test_stopping_ends_its_rest(shapes, clock):
    made = [clock.slow(shape, 1000.0) for shape in shapes("a", "b")]
    background = BackgroundCompiler(made, shapes.compilations, lambda: True, clock=clock)
    background.start()
    background.stop()
    assert shapes.compiled in ([], ["a"]) and not background.is_running


def test_it_lowers_the_compilers_priority_while_it_runs_and_logs_how_many_steps_were_padded(shapes, caplog):
    happened = shapes.compiled

    @contextmanager
    def lowered():
        happened.append("lowered")
        yield
        happened.append("raised")

    background = BackgroundCompiler(shapes("a", "b"), shapes.compilations, lambda: False, lowered)
    shapes.compilations.lacked("b")
    with caplog.at_level(logging.INFO, "jpaged"):
        background.start()
        ended(background)
    assert happened == ["lowered", "b", "a", "raised"]
    begin, end = [record.getMessage() for record in caplog.records]
    assert begin == "2 shapes are compiled in the background; until then steps are padded to larger ones"
    assert end.startswith("compiled 2 shapes in the background") and "1 steps and draws were padded" in end


@pytest.mark.parametrize("how", ["tracing", "compiling"])
def test_one_that_fails_is_logged_and_the_others_are_compiled(how, shapes, caplog):
    background = BackgroundCompiler(shapes("a", "b", "c", **{how: "b"}), shapes.compilations, lambda: False)
    background.start()
    ended(background)
    assert shapes.compiled == ["a", "c"]
    (error,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "the b cannot be compiled in the background" in error.getMessage() and error.exc_info
    assert not shapes.compilations.warm, "a step may need it yet"


def test_stopping_waits_for_the_shape_that_is_being_compiled_and_leaves_the_others(shapes):
    shapes.go_on.clear()
    background = BackgroundCompiler(shapes("a", "b"), shapes.compilations, lambda: False)
    background.start()
    assert shapes.begun.acquire(timeout=60)
    stopping = threading.Thread(target=background.stop)
    stopping.start()
    assert background.stopping.wait(60) and stopping.is_alive(), "a compiler that is left alone crashes"
    shapes.go_on.set()
    stopping.join(60)
    assert not background.is_running and shapes.compiled == ["a"]
    assert shapes.compilations.num_to_come == 0 and not shapes.compilations.warm
    background.stop()


def test_it_can_be_stopped_in_its_own_thread_where_the_garbage_collector_closes_an_engine(shapes):
    made = shapes("a", "b")
    background = BackgroundCompiler(
        [Shape("closes", lambda: background.stop() or made[0].trace()), made[1]], shapes.compilations, lambda: False
    )
    background.start()
    ended(background)
    assert shapes.compiled == []


def test_it_ends_with_the_program():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["compiled 0", "the program ends"] and "compiled 99" not in done.stdout

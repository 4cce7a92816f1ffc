"""Compiling in the background: in order, once, to the end or until it is stopped, whatever fails."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading

import pytest

from jpaged.engine.compilation import BackgroundCompiler
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

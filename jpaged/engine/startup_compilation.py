"""Compiles the shapes of an engine's first requests at its start, and leaves the rest to a thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import jax

from jpaged.engine.compilation import BackgroundCompiler
from jpaged.engine.engine import Engine
from jpaged.execution.compile.compiler_threads import CompilerThreads
from jpaged.execution.programs import Compile
from jpaged.execution.shapes import Shape, compiled_in_threads

logger = logging.getLogger(__name__)
progress = logging.getLogger("jpaged.progress")


def compile_while_serving(engine: Engine) -> None:
    """Compile the smallest shapes and those with which every step can run, then start a thread for the others.

    Until its own shape is compiled, a step runs in the smallest compiled one that holds it.
    """
    runner, start = engine.runner, time.monotonic()
    first = [*map(_unless_it_fails, runner.shapes.smallest()), *runner.shapes.needed()]
    later = runner.shapes.later()
    progress.info("compiling or finding %d programs and their kernels before the first request", len(first))
    threads = CompilerThreads()
    jax.block_until_ready(runner.worker.pool)  # no other work of XLA's may look like compiling
    with threads.found():
        for done, name in enumerate(compiled_in_threads(first), start=1):
            logger.info("compiled %d of %d: %s, %.1f s so far", done, len(first), name, time.monotonic() - start)
    logger.info(
        "compiled %d shapes in %.1f s; the other %d are compiled while requests are served",
        len(first),
        time.monotonic() - start,
        len(later),
    )
    if (store := runner.worker.programs) is not None:
        logger.info("%d programs were found in %s, and not compiled", store.num_found, store.folder)
    runner.takes_larger = True
    _compile_in_background(engine, later, threads.lowered)


def _unless_it_fails(shape: Shape) -> Shape:
    """Return a shape whose failure is logged, and no more: a larger one takes its place."""

    def trace() -> Compile:
        compile_it: list[Compile] = []
        with _logging(shape):
            compile_it.append(shape.trace())

        def run() -> None:
            with _logging(shape):
                for each in compile_it:
                    each()

        return run

    return replace(shape, trace=trace)


@contextmanager
def _logging(shape: Shape) -> Iterator[None]:
    try:
        yield
    except Exception:
        logger.exception("the %s cannot be compiled; steps take a larger one", shape.name)


def compile_anew(engine: Engine) -> None:
    """Compile all shapes again in a thread, first those with which every step can run.

    Call it after `Engine.stop_compiling`, when weights are held in another form, which needs other programs. Without a
    background compiler it does nothing. A step that finds no compiled shape large enough compiles its own.
    """
    if engine.background is None:
        return
    shapes = engine.runner.shapes
    engine.runner.worker.compilations.warm = False
    _compile_in_background(engine, [*shapes.first(), *shapes.later()], engine.background.lowered)


def _compile_in_background(
    engine: Engine, shapes: Sequence[Shape], lowered: Callable[[], AbstractContextManager[None]]
) -> None:
    engine.background = BackgroundCompiler(
        shapes, engine.runner.worker.compilations, lambda: any(replica.has_work for replica in engine.replicas), lowered
    )
    engine.background.start()

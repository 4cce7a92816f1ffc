"""Compiles the shapes of an engine's first requests at its start, and leaves the rest to a thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from jpaged.engine.compilation import BackgroundCompiler
from jpaged.engine.engine import Engine
from jpaged.execution.shapes import Shape, compiled_in_threads

logger = logging.getLogger(__name__)


def compile_while_serving(engine: Engine) -> None:
    """Compile the shapes with which every step can run; then return, and compile the others in a thread. A step runs in
    the next larger shape that is compiled until then."""
    runner, start = engine.runner, time.monotonic()
    first, later = runner.shapes.first(), runner.shapes.later()
    for _ in compiled_in_threads(first):
        pass
    logger.info(
        "compiled %d shapes in %.1f s; the other %d are compiled while requests are served",
        len(first),
        time.monotonic() - start,
        len(later),
    )
    runner.takes_larger = True
    _compile_in_background(engine, later)


def compile_anew(engine: Engine) -> None:
    """Compile all shapes in a thread, those with which every step can run first, after `Engine.stop_compiling`; nothing
    where the engine has no such thread. For weights that are held otherwise than before, which other programs take: a
    step that finds none that holds it compiles its own."""
    if engine.background is None:
        return
    shapes = engine.runner.shapes
    engine.runner.worker.compilations.warm = False
    _compile_in_background(engine, [*shapes.first(), *shapes.later()])


def _compile_in_background(engine: Engine, shapes: Sequence[Shape]) -> None:
    engine.background = BackgroundCompiler(
        shapes, engine.runner.worker.compilations, lambda: any(replica.has_work for replica in engine.replicas)
    )
    engine.background.start()

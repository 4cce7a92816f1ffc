"""Compiles what an engine's first requests need, and leaves the rest to the background."""

from __future__ import annotations

import logging
import time

from jpaged.engine.background import BackgroundCompiler
from jpaged.engine.engine import Engine
from jpaged.execution.compiling import compiled_in_threads

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
    engine.background = BackgroundCompiler(
        later, runner.worker.compilations, lambda: any(replica.has_work for replica in engine.replicas)
    )
    engine.background.start()

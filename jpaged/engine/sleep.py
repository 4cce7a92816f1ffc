"""Gives an engine's device memory back while nothing is generated, and takes it again.

A trainer needs the memory of pool and weights for itself between rollouts. What was compiled stays, so waking costs no
compilation. Requests that have begun wait with their tokens and are computed again afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

from jpaged.engine.new_weights import HeldWeights, replacement
from jpaged.validation import one_of

if TYPE_CHECKING:
    from jpaged.engine.engine import Engine

Released = Literal[False, "host", True]
"""What becomes of the weights, see `SleepHandle.release_memory`."""

TAGS = ("weights", "kv_cache")
"""Parts of the memory that vLLM's `wake_up` knows."""


def release(engine: Engine, weights: Released) -> None:
    """Give the memory back; see `SleepHandle.release_memory`."""
    if weights != "host" and not isinstance(weights, bool):
        raise ValueError(f"weights={weights!r} is not False, 'host' or True")
    worker = engine.runner.worker
    if weights is not False:
        worker.model.check_local("release_memory()")
    if not engine.is_asleep:
        engine.settle("release_memory()")
    with engine.change():
        engine.recovery.fall_asleep()
        worker.release()
        if weights is True or (weights == "host" and worker.model.has_params):
            worker.models.release_params(keep=weights == "host")


def restore(held: HeldWeights, engine: Engine, params: Any) -> Callable[[], None]:
    """Return what takes the memory again, to be called between two steps; see `SleepHandle.restore_memory`."""
    put = None
    if params is not None:
        put = replacement(held, engine, params, cast=False, copy=False, running="recompute")

    def wake() -> None:
        worker = engine.runner.worker
        if put is not None:
            put()
        if not worker.models.restore_params():
            raise ValueError("params=None, but release_memory(weights=True) left no weights: give params")
        if engine.is_asleep:
            with engine.change():
                engine.recovery.wake_up()

    return wake


def level_of(level: int) -> Released:
    """Return what vLLM's ``sleep(level)`` does with the weights: 1 moves them to the host, 2 lets go of them.

    Raises:
        ValueError: it is another level.
    """
    if level not in (1, 2) or isinstance(level, bool):
        raise ValueError(f"level={level!r} is not 1 or 2")
    return "host" if level == 1 else True


def parts_of(tags: Iterable[str] | None) -> set[str]:
    """Return which parts vLLM's ``wake_up(tags)`` takes again: None = both.

    Raises:
        ValueError: a tag is another one, or they are no list.
    """
    if isinstance(tags, str):
        raise ValueError(f"tags={tags!r} must be a list of {', '.join(TAGS)}")
    chosen = set(TAGS if tags is None else tags)
    for tag in sorted(chosen):
        one_of("tags", tag, TAGS)
    return chosen


def wake_parts(held: HeldWeights, engine: Engine, tags: set[str]) -> Callable[[], None]:
    """Return what takes some parts of the memory again, by vLLM's names: the pool with the weights, which every step
    needs. Weights that `sleep` let go of are not there until `update_params` brings others: then the pool can be
    taken."""
    if "kv_cache" in tags:
        return restore(held, engine, None)

    def wake() -> None:
        if "weights" in tags:
            engine.runner.worker.models.restore_params()

    return wake

"""Replaces an engine's weights, and treats requests and cached KV that belong to the old ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jpaged.scheduling.held import made_by_weights
from jpaged.validation import boolean, one_of

if TYPE_CHECKING:
    from jpaged.engine.engine import Engine
    from jpaged.execution.programs import ModelPrograms

Running = Literal["recompute", "finish", "abort"]
"""Treatment of unfinished requests, see `LLM.update_params`."""

RUNNING = ("recompute", "finish", "abort")


@dataclass(frozen=True)
class HeldWeights:
    """Describes how an engine holds its weights, also while the engine is lent or the weights are not on its devices.

    Attributes:
        programs: the programs that hold the weights; the form of the weights may change.
        model: the model with shapes for arrays.
        dtype: dtype of weights that are not quantised.
        quantization: format in which matrices are held, see `EngineConfig`.
    """

    programs: ModelPrograms
    model: Any
    dtype: Any
    quantization: str | None

    @property
    def described(self) -> Any:
        """Return shapes, dtypes and shardings of the weights as they are held now."""
        return self.programs.described


def replacement(
    held: HeldWeights, engine: Engine, new: Any, *, cast: bool, copy: bool, running: str
) -> Callable[[], None]:
    """Prepare new weights and return the function that puts them in place, which is called between two steps.

    The slow work is done before, unless it runs programs on several of the engine's devices: steps would run there at
    the same time.

    Args:
        new, cast, copy, running: see `LLM.update_params`.

    Raises:
        ValueError: an argument has another value, or the weights do not fit.
    """
    from jpaged.execution.params import float32_shapes, num_compact, to_float32  # imports jax, which takes a second
    from jpaged.loading import state_dict

    boolean("cast", cast)
    boolean("copy", copy)
    one_of("running", running, RUNNING)
    worker, mesh = engine.runner.worker, engine.runner.mesh
    old = float32_shapes(held.described)
    new = state_dict.state_of(new, old)
    if state_dict.is_state_dict(new):
        layout = {"dtype": held.dtype, "quantization": held.quantization, "cast": cast}
        new = state_dict.params_of(new, held.model, held.described, mesh, **layout)
    elif cast:
        new = state_dict.cast_like(new, old)
    before = None if worker.model.cuts_on_devices(new) else worker.model.placed(new, copy=copy)

    def put() -> None:
        placed = new if before is None else before
        if num_compact(placed) and not worker.model.num_compact:  # meanwhile another thread read the held ones
            placed = to_float32(placed)
        if before is None:
            placed = worker.model.placed(placed, copy=copy)

        def replace() -> None:
            replace_weights(engine, lambda: worker.models.update_params(placed), running)

        if num_compact(placed) == worker.model.num_compact:
            replace()
        else:
            _with_other_programs(engine, replace)

    return put


def hold_as_float32(engine: Engine, caller: str) -> None:
    """Make an engine hold its weights as float32 arrays, see `jpaged.execution.params`; KV and tokens stay the same.

    Raises:
        RuntimeError: the engine is in the middle of a step; the message names the caller.
    """
    worker = engine.runner.worker
    if not worker.model.num_compact:
        return
    if not engine.is_released:
        engine.settle(caller)

    def hold() -> None:
        with engine.change():
            worker.models.hold_as_float32()

    _with_other_programs(engine, hold)


def _with_other_programs(engine: Engine, change: Callable[[], None]) -> None:
    """Change how weights are held, which needs other programs.

    An engine that compiles in the background then compiles all shapes again, also if the change was refused.
    """
    from jpaged.engine.startup_compilation import compile_anew  # imports jax

    engine.stop_compiling()
    try:
        change()
    finally:
        compile_anew(engine)


def replace_weights(engine: Engine, replace: Callable[[], None], running: str) -> None:
    """Replace an engine's weights, then treat its requests, pins and prefix cache as `running` says.

    Raises:
        ValueError: ``running="finish"`` while requests hold images; the old weights stay.
        RuntimeError: the engine is in the middle of a step.
    """
    if not engine.is_released:
        engine.settle("update_params()")
    engine.prefixes.stop()  # the KV that they compute is of no use afterwards
    if running == "finish" and any(map(made_by_weights, engine.requests.unfinished.values())):
        raise ValueError(
            "running='finish' cannot keep what the old weights made of images: give 'recompute' or 'abort'"
        )
    refused: Exception | None = None
    with engine.change():
        try:
            replace()
        except Exception as error:  # nothing has changed
            refused = error
        else:
            _forget_old(engine, running)
    if refused is not None:
        raise refused
    engine.give_back_memory(at_once=True)


def _forget_old(engine: Engine, running: str) -> None:
    if running == "abort":
        engine.requests.end_all()
    recomputed = running == "recompute" and bool(engine.requests.unfinished)
    for replica in engine.replicas:
        if not recomputed:
            replica.pins.release()
        replica.memory.new_generation()  # an empty pool is not enough: tiers keep the old weights' blocks
    if recomputed:
        engine.recovery.begin_again(scores_too=True)

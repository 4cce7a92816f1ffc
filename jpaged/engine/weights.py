"""Puts other weights in the place of an engine's, and says what becomes of KV that belongs to the old ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jpaged.validation import boolean, one_of

if TYPE_CHECKING:
    from jpaged.engine.engine import Engine
    from jpaged.execution.programs import ModelPrograms

Running = Literal["recompute", "finish", "abort"]
"""What becomes of unfinished requests, see `LLM.update_params`."""

RUNNING = ("recompute", "finish", "abort")


@dataclass(frozen=True)
class HeldWeights:
    """Says how an engine holds its weights, whoever has the engine and wherever the weights are.

    Attributes:
        programs: what has them; their form may change.
        model: the model with shapes for arrays.
        dtype: dtype of those that are not quantised.
        quantization: what matrices are held in, see `EngineConfig`.
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
    """Return what puts new weights in place, to be called between two steps; what takes long is done before, unless it
    runs programs on several devices of the engine's, whose steps would run beside them.

    Args:
        new, cast, copy, running: see `LLM.update_params`.

    Raises:
        ValueError: an argument is none of those, or the weights do not fit.
    """
    from jpaged.execution.params import float32_shapes, num_compact  # imports jax, which takes a second
    from jpaged.loading import nnx_state, state_dict

    boolean("cast", cast)
    boolean("copy", copy)
    one_of("running", running, RUNNING)
    worker, mesh = engine.runner.worker, engine.runner.mesh
    old = float32_shapes(held.described)
    new = nnx_state.state_of(new, old)
    if state_dict.is_state_dict(new):
        layout = {"dtype": held.dtype, "quantization": held.quantization, "cast": cast}
        new = state_dict.params_of(new, held.model, held.described, mesh, **layout)
    elif cast:
        new = state_dict.cast_like(new, old)
    before = None if worker.model.cuts_beside(new) else worker.model.placed(new, copy=copy)

    def put() -> None:
        placed = worker.model.placed(new, copy=copy) if before is None else before

        def replace() -> None:
            replace_weights(engine, lambda: worker.models.update_params(placed), running)

        if num_compact(placed) == worker.model.num_compact:
            replace()
        else:
            _with_other_programs(engine, replace)

    return put


def hold_as_float32(engine: Engine, caller: str) -> None:
    """Have an engine hold its weights as arrays, see `jpaged.execution.params`; nothing that it has computed
    changes.

    Raises:
        RuntimeError: the engine is in the middle of a step; names the caller.
    """
    worker = engine.runner.worker
    if not worker.model.num_compact:
        return
    if not engine.is_released:
        engine.settle(caller)

    def widen() -> None:
        with engine.change():
            worker.models.hold_as_float32()

    _with_other_programs(engine, widen)


def _with_other_programs(engine: Engine, change: Callable[[], None]) -> None:
    """Change how weights are held, which takes other programs; an engine that compiles in the background begins again
    with that, whether they were changed or refused."""
    from jpaged.engine.startup_compilation import compile_anew  # imports jax

    engine.stop_compiling()
    try:
        change()
    finally:
        compile_anew(engine)


def replace_weights(engine: Engine, replace: Callable[[], None], running: str) -> None:
    """Replace an engine's weights, then do with its requests, its pins and its prefix cache what `running` says.

    Raises:
        ValueError: ``running="finish"`` while requests hold images; the old weights stay.
        RuntimeError: the engine is in the middle of a step.
    """
    if not engine.is_released:
        engine.settle("update_params()")
    engine.prefixes.stop()  # what it computes is of no use afterwards
    if running == "finish" and any(request.images for request in engine.requests.unfinished.values()):
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
    if running == "recompute" and engine.requests.unfinished:
        engine.recovery.begin_again(scores_too=True)
        return
    for replica in engine.replicas:
        replica.pins.release()
        replica.memory.new_generation()

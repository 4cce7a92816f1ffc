"""Puts other weights in the place of an engine's, and says what becomes of KV that belongs to the old ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jpaged.validation import boolean, one_of

if TYPE_CHECKING:
    from jpaged.engine.engine import Engine

Running = Literal["recompute", "finish", "abort"]
"""What becomes of unfinished requests, see `ModelHandle.update_params`."""

RUNNING = ("recompute", "finish", "abort")


@dataclass(frozen=True)
class HeldWeights:
    """Says how an engine holds its weights, whoever has the engine and wherever the weights are.

    Attributes:
        described: their shapes, dtypes and shardings.
        model: the model with shapes for arrays.
        dtype: dtype of those that are not quantised.
        quantization: what matrices are held in, see `EngineConfig`.
    """

    described: Any
    model: Any
    dtype: Any
    quantization: str | None


def replacement(
    held: HeldWeights, engine: Engine, new: Any, *, cast: bool, copy: bool, running: str
) -> Callable[[], None]:
    """Return what puts new weights in place, to be called between two steps; what takes long is done before.

    Args:
        new, cast, copy, running: see `ModelHandle.update_params`.

    Raises:
        ValueError: an argument is none of those, or the weights do not fit.
    """
    from jpaged.loading import nnx_state, state_dict  # imports jax, which takes a second

    boolean("cast", cast)
    boolean("copy", copy)
    one_of("running", running, RUNNING)
    worker, mesh = engine.runner.worker, engine.runner.mesh
    old = held.described
    new = nnx_state.state_of(new, old)
    if state_dict.is_state_dict(new):
        layout = {"dtype": held.dtype, "quantization": held.quantization, "cast": cast}
        new = state_dict.params_of(new, held.model, old, mesh, **layout)
    elif cast:
        new = state_dict.cast_like(new, old)
    placed = worker.model.placed(new, copy=copy)

    def put() -> None:
        replace_weights(engine, lambda: worker.models.update_params(placed), running)

    return put


def replace_weights(engine: Engine, replace: Callable[[], None], running: str) -> None:
    """Replace an engine's weights, then do with its requests, its pins and its prefix cache what `running` says.

    Raises:
        ValueError: ``running="finish"`` while requests hold images; the old weights stay.
        RuntimeError: the engine is in the middle of a step.
    """
    if not engine.is_asleep:
        engine.settle("update_params()")
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
    engine.give_back_memory()


def _forget_old(engine: Engine, running: str) -> None:
    if running == "abort":
        engine.requests.end_all()
    if running == "recompute" and engine.requests.unfinished:
        engine.recovery.begin_again(scores_too=True)
        return
    for replica in engine.replicas:
        replica.pins.release()
        replica.memory.new_generation()

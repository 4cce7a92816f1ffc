"""What `jpaged.LLM` does with the state of its engine: save it, go on from it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jpaged.engine import offline
from jpaged.engine.engine import Engine
from jpaged.engine.model_handle import ModelHandle
from jpaged.outputs import PinnedPrefix, RequestOutput, SavedState

if TYPE_CHECKING:
    from jpaged.engine.builder import Built
    from jpaged.engine.saved_state.keeper import StateKeeper

T = TypeVar("T")


class StateHandle(ModelHandle):
    """Holds an engine whose state can be saved and taken up."""

    def __init__(self, built: Built) -> None:
        super().__init__(built)
        self._state = make_keeper(self, built.engine, partial(_in_turn, built.engine))

    def save_state(self, folder: str | Path) -> SavedState:
        """Write the engine's state as it is between two steps: requests and what they have generated, the KV in use or
        cached, queues, pins. `load_state` and `restore_state` go on from it.

        Call it between two deltas of `stream`, or in a handler of SIGINT, SIGTERM or SIGALRM, which may come in the
        middle of `generate`; from another thread it waits until `generate` has returned. A save that is interrupted
        leaves the one before.

        Args:
            folder: made where there is none; it holds the last save and nothing else.

        Raises:
            RuntimeError: `pin_prefix` is computing a prefix, or `embed`, `classify` or `score` a vector; a handler of
                another signal came in the middle of a step, any came in the middle of a save; or the devices belong to
                several processes.
            OSError: the disk refuses.
        """
        self.check_health()
        _ = self._engine.turn  # an AsyncLLM may have the engine
        return self._state.save(folder)

    def load_state(self, folder: str | Path) -> list[str]:
        """Go on from a saved state and return the names of the requests that came with it, in order of arrival.

        `resume` runs them to their ends.

        The LLM must be fresh. Its settings may be others than those of the engine that was saved: where its blocks mean
        something else, as on another number of devices, requests are computed again from their tokens, and in a smaller
        pool those that have no room are. Their tokens stay the same. A request that could never end here, as in a pool
        that is too small for it, ends with finish_reason "abort" and a stop_reason that says why.

        Raises:
            StateRefused: there is no state, or it is damaged or of another model or format; the LLM is as it was.
            RuntimeError: this LLM has requests or pinned prefixes.
        """
        self.check_health()
        _ = self._engine.turn
        return [name_of(request) for request in self._state.load(folder)]

    @property
    def restored_requests(self) -> list[str]:
        """Return the names of the requests that `load_state` brought and nobody has taken up: what the client of an
        AsyncLLM called them, or their numbers."""
        return [name_of(request) for request in self._engine.requests.restored.values()]

    def resume(self, use_tqdm: bool = True) -> list[RequestOutput]:
        """Run the restored requests to their ends and return their whole outputs, in order of arrival; each
        `request_id` is one of `restored_requests`. Where it is interrupted, it can be called again."""
        return offline.resume(self._engine, self.output_processor, use_tqdm)

    @property
    def pinned_prefixes(self) -> list[PinnedPrefix]:
        """Return what is pinned, restored pins among them, for `unpin`."""
        with self._engine.turn:
            return [PinnedPrefix(seq_id, length) for seq_id, length in self._engine.prefixes.lengths.items()]


def name_of(request: Any) -> str:
    """Return what a request is called outside: as its client called it, or by its number."""
    return str(request.request_id) if request.name is None else request.name


def make_keeper(handle: ModelHandle, engine: Engine, between_steps: Callable[[Callable[[], Any]], Any]) -> StateKeeper:
    """Return what saves and loads the state of a handle's engine."""
    from jpaged.engine.saved_state.keeper import StateKeeper  # imports jax, which takes a second

    return StateKeeper(engine, handle.config, handle.model_config, handle.input_processor, between_steps)


def _in_turn(engine: Engine, function: Callable[[], T]) -> T:
    with engine.turn:
        return function()

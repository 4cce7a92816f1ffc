"""What `jpaged.LLM` does to lend its device memory to a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jpaged.engine.saved_state.handle import StateHandle
from jpaged.engine.sleep import Released, level_of, parts_of, release, restore, wake_parts
from jpaged.outputs import RequestOutput


class SleepHandle(StateHandle):
    """Holds an engine whose memory can be given back and taken again."""

    def release_memory(self, weights: Released = False) -> None:
        """Give the pool's memory back, and the weights' if asked, until `restore_memory` or `resume`.

        The prefix cache is empty afterwards and pinned prefixes are computed again. Requests that have begun, as those
        of open streams, wait with their tokens; they are computed again and go on with the same tokens. Until then
        whatever needs a step raises RuntimeError; a stream that is asked for its next delta meanwhile ends by that, and
        its requests with it.

        Args:
            weights: False: they stay. "host": they move to host memory. True: they are let go of, and others have to be
                given. Arrays that the caller holds too, from `params` or given to `update_params`, live on.

        Raises:
            ValueError: `weights` is something else.
            RuntimeError: a signal's handler calls it in the middle of a step; or weights are to be released that lie on
                several hosts.
        """
        with self._engine.turn:
            release(self._engine, weights)

    def restore_memory(self, params: Any = None) -> None:
        """Take the memory again that `release_memory` gave back; where it gave none, only `params` matter.

        Args:
            params: new weights, as `update_params` takes them; None = those of before.

        Raises:
            ValueError: there are no weights of before, or the new ones do not fit.
        """
        with self._engine.turn:
            restore(self.held_weights, self._engine, params)()

    def resume(self, use_tqdm: bool = True, *, params: Any = None) -> list[RequestOutput]:
        """Take released memory again, as `restore_memory` does, then run restored requests to their ends and return
        their whole outputs, in order of arrival; each `request_id` is one of `restored_requests`. Where it is
        interrupted, it can be called again.

        Args and raises: `params`, see `restore_memory`.
        """
        if params is not None or self.is_sleeping:
            self.restore_memory(params)
        return super().resume(use_tqdm)

    @property
    def is_sleeping(self) -> bool:
        """Tell whether memory is given back."""
        return self._engine.is_asleep

    def sleep(self, level: int = 1) -> None:
        """Do what vLLM's `sleep` does: ``release_memory("host")`` at level 1, ``release_memory(True)`` at level 2.

        Raises:
            ValueError: `level` is neither.
        """
        self.release_memory(level_of(level))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Do what vLLM's `wake_up` does: take weights and pool again, or with `tags` ``["weights"]`` these only;
        ``"kv_cache"`` brings the weights along where they are not there yet, as steps begin with it. After
        ``sleep(level=2)`` `update_params` brings the weights before the pool is taken.

        Raises:
            ValueError: a tag is unknown, or the pool is asked for while there are no weights.
        """
        with self._engine.turn:
            wake_parts(self.held_weights, self._engine, parts_of(tags))()

"""Saves the engine's state to a folder, so that a restarted server continues the requests of the one before."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from jpaged import AsyncLLM, StateRefused
from jpaged.claims import FILES, Claim
from jpaged.server.caller import AGAIN
from jpaged.server.settings import claim_state

logger = logging.getLogger(__name__)
RESTORED_TIMEOUT = 600.0
"""Seconds that restored requests wait for their clients to send them again."""
_CHECK_INTERVAL = 0.5
"""Seconds between two checks of the engine while its last state is saved."""


class KeptState:
    """The saved state of a server's engine. Used from the event loop only.

    Args:
        folder: holds the last save and, in `responses`, the stored responses. None: nothing is saved, and all methods
            do nothing.
        save_every: seconds between two saves.
        step_timeout: limit on the seconds of a step while the last state is saved.
        claim: what `claim_state` returned for the folder, which the caller releases; None: `restore` claims it.

    Attributes:
        stalled: whether the last save was abandoned because a step did not end in time.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        folder: Path | None,
        save_every: float,
        step_timeout: float = 30.0,
        claim: Claim | None = None,
    ) -> None:
        self.stalled = False
        self._engine = engine
        self._folder = folder
        self._save_every = save_every
        self._step_timeout = step_timeout
        self._claimed = claim is not None
        self._claim: Claim | None = None
        self._restored = False
        self._end_timer: asyncio.Task[None] | None = None
        self._last: asyncio.Task[None] | None = None

    async def restore(self) -> None:
        """Load the folder's state, if there is one, and begin to save. A refused state is ignored and logged.

        Restored requests without an Idempotency-Key end, since no client can send them again.

        Raises:
            StateRefused: this engine's state cannot be saved, or another server uses the folder.
            OSError: the folder cannot be written.
        """
        if self._folder is None:
            return
        if not self._claimed:
            self._claim = claim_state(self._folder)
        try:
            if any(entry.name not in FILES for entry in self._folder.iterdir()):
                await self._load(self._folder)
            else:
                await self._engine.save_state(self._folder)
        except (RuntimeError, OSError) as error:
            self.release()
            if isinstance(error, OSError):
                raise
            raise StateRefused(f"state_dir={str(self._folder)!r}: {error}") from error
        self._engine.save_every(self._folder, self._save_every)
        self._restored = True

    def release(self) -> None:
        """Let another server use the folder, if `restore` claimed it; nothing is saved any more then. Calling it twice
        is harmless; the end of the process does it too."""
        if self._claim is not None:
            self._claim.release()
            self._restored = False

    async def _load(self, folder: Path) -> None:
        try:
            names = await self._engine.load_state(folder)
        except StateRefused as error:
            logger.error("the saved state is refused, and the next save will replace it: %s", error)
            return
        awaited = [name for name in names if name.startswith(AGAIN)]
        for name in names:
            if name not in awaited:
                await self._engine.abort(name)
        logger.info(
            "%d of %d restored requests wait for their clients to send them again; stored responses go on anyway",
            len(awaited),
            len(names),
        )
        if awaited:
            self._end_timer = asyncio.create_task(self._end_unclaimed())

    async def _end_unclaimed(self) -> None:
        await asyncio.sleep(RESTORED_TIMEOUT)
        for name in self._engine.restored_requests:
            logger.warning("a restored request ends: its client did not send it again within %g s", RESTORED_TIMEOUT)
            await self._engine.abort(name)

    async def save_last(self) -> None:
        """Save the state a last time, with running requests, and stop saving. A second call waits for the first.

        Nothing is saved unless `restore` has succeeded: the folder is another server's, or holds requests that are not
        in this engine.

        The save is not limited in time, but it is abandoned, and the previous one stays, if a step of the engine does
        not end within `step_timeout`.
        """
        if self._last is None:
            self._last = asyncio.create_task(self._save_last())
        await asyncio.shield(self._last)

    async def _save_last(self) -> None:
        if self._folder is None or not self._restored:
            return
        if self._end_timer is not None:
            self._end_timer.cancel()
        saving = asyncio.create_task(self._save(self._folder))
        try:
            while not await self._ended(saving):
                pass
            if not self.stalled:
                saving.result()
        except (OSError, RuntimeError) as error:
            logger.error("the last state was not saved: %s", error)
        finally:
            saving.cancel()
            self.release()

    async def _ended(self, saving: asyncio.Task[None]) -> bool:
        """Wait a moment for a save; tell whether it has ended or is abandoned."""
        if (await asyncio.wait((saving,), timeout=_CHECK_INTERVAL))[0]:
            return True
        try:
            await self._engine.check_health(timeout=self._step_timeout)
        except TimeoutError:
            if saving.done():
                return True
            self.stalled = True
            logger.error(
                "the last state is not saved: the running step has not ended for %g s; the previous save stays",
                self._step_timeout,
            )
        return self.stalled

    async def _save(self, folder: Path) -> None:
        await self._engine.stop_saving()
        await self._engine.save_state(folder)

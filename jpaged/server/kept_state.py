"""Keeps the engine's state in a folder, so that a server that was killed goes on with what it ran."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from jpaged import AsyncLLM, StateRefused
from jpaged.server.caller import AGAIN

logger = logging.getLogger(__name__)
PATIENCE = 600.0
"""Seconds in which clients may ask again for requests that came with a saved state."""
_BETWEEN_LOOKS = 0.5
"""Seconds from one look at the engine to the next while its last state is saved."""


class KeptState:
    """The state of a server's engine, in a folder.

    Args:
        folder: holds the last save and, in `responses`, what `/v1/responses` keeps; None = no state is kept, and all of
            this does nothing.
        save_every: seconds from one save to the next.
        step_timeout: seconds within which the engine has to come between two steps while its last state is saved.

    Attributes:
        stalled: whether the last state was given up, as a step did not end in time.
    """

    def __init__(self, engine: AsyncLLM, folder: Path | None, save_every: float, step_timeout: float = 30.0) -> None:
        self.stalled = False
        self._engine = engine
        self._folder = folder
        self._save_every = save_every
        self._step_timeout = step_timeout
        self._patience: asyncio.Task[None] | None = None

    async def take_up(self) -> None:
        """Go on from the folder's state and begin to save. A state that is refused is left aside, and the log says why.

        Requests that nobody can ask for again, as they came without an Idempotency-Key, end.

        Raises:
            StateRefused: this engine has no state that could be saved.
            OSError: the folder cannot be written.
        """
        if self._folder is None:
            return
        try:
            if self._folder.is_dir() and any(self._folder.iterdir()):
                await self._go_on(self._folder)
            else:
                await self._engine.save_state(self._folder)
        except RuntimeError as error:
            folder, self._folder = self._folder, None
            raise StateRefused(f"state_dir={str(folder)!r}: {error}") from error
        self._engine.save_every(self._folder, self._save_every)

    async def _go_on(self, folder: Path) -> None:
        try:
            names = await self._engine.load_state(folder)
        except StateRefused as error:
            logger.error("the server starts cold, and its saves replace the state that is refused: %s", error)
            return
        awaited = [name for name in names if name.startswith(AGAIN)]
        for name in names:
            if name not in awaited:
                await self._engine.abort(name)
        logger.info("%d of %d restored requests wait for their clients to ask again", len(awaited), len(names))
        if awaited:
            self._patience = asyncio.create_task(self._give_up())

    async def _give_up(self) -> None:
        await asyncio.sleep(PATIENCE)
        for name in self._engine.restored_requests:
            logger.warning("nobody asked again for a restored request within %g s: it ends", PATIENCE)
            await self._engine.abort(name)

    async def save_last(self) -> None:
        """Save what is there now, running requests included, and no more from then on; again is no error.

        A save takes as long as its folder does. It is given up, and the save before stays, where a step of the engine
        does not end within `step_timeout`.
        """
        folder, self._folder = self._folder, None
        if folder is None:
            return
        if self._patience is not None:
            self._patience.cancel()
        saving = asyncio.create_task(self._save(folder))
        try:
            while not await self._ended(saving):
                pass
            if not self.stalled:
                saving.result()
        except (OSError, RuntimeError) as error:
            logger.error("the last state was not saved: %s", error)
        finally:
            saving.cancel()

    async def _ended(self, saving: asyncio.Task[None]) -> bool:
        """Wait a little for a save; tell whether it has ended or is given up."""
        if (await asyncio.wait((saving,), timeout=_BETWEEN_LOOKS))[0]:
            return True
        try:
            await self._engine.check_health(timeout=self._step_timeout)
        except TimeoutError:
            if saving.done():
                return True
            self.stalled = True
            logger.error(
                "the last state is not saved, as the step that runs has not ended for %g s; the save before stays",
                self._step_timeout,
            )
        return self.stalled

    async def _save(self, folder: Path) -> None:
        await self._engine.stop_saving()
        await self._engine.save_state(folder)

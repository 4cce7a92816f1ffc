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


class KeptState:
    """The state of a server's engine, in a folder.

    Args:
        folder: holds the last save and, in `responses`, what `/v1/responses` keeps; None = no state is kept, and all of
            this does nothing.
        save_every: seconds from one save to the next.
    """

    def __init__(self, engine: AsyncLLM, folder: Path | None, save_every: float) -> None:
        self._engine = engine
        self._folder = folder
        self._save_every = save_every
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
        """Save what is there now, running requests included, and no more from then on; again is no error."""
        folder, self._folder = self._folder, None
        if folder is None:
            return
        if self._patience is not None:
            self._patience.cancel()
        try:
            await self._engine.stop_saving()
            await self._engine.save_state(folder)
        except (OSError, RuntimeError) as error:
            logger.error("the last state was not saved: %s", error)

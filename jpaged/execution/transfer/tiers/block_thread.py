"""One thread that writes blocks to a file or to memory and reads them, while the engine goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import numpy as np

from jpaged.execution.transfer.block_mover import block_bytes
from jpaged.execution.transfer.tiers.block_file import BlockFile, DamagedBlock
from jpaged.execution.transfer.tiers.block_memory import BlockMemory
from jpaged.memory.tiers import StoredBlock, TierName, TierRead, TierWrite

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
"""Most seconds that closing waits for what the disk does just now."""


class BlockThread:
    """Runs reads and writes in the order of their requests, so that a read finds all blocks whose write came before.

    An error of the disk closes it, as `close` does: later reads find nothing.

    Args:
        file: has the bytes; from now on the thread alone uses it.
        name: of the tier, for the log.
    """

    def __init__(self, file: BlockFile | BlockMemory, name: TierName = "disk") -> None:
        self.name = name
        self._file = file
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jpaged-tier")
        self._lock = threading.Lock()
        self._reads: set[TierRead] = set()  # those that have not ended
        self._ended: Future[None] | None = None
        self._queued_bytes = 0
        self._epoch = 0
        self._is_open = True
        self._ident: int | None = None

    @property
    def is_open(self) -> bool:
        """Tell whether it still writes and reads."""
        return self._is_open

    @property
    def num_queued_bytes(self) -> int:
        """Return the size of the launches that are not written yet."""
        return self._queued_bytes

    def write(self, launch: jax.Array, writes: Sequence[tuple[int, TierWrite]]) -> None:
        """Write blocks of a launch, [shards, blocks, ...], once the device is done with it; returns at once.

        Args:
            writes: rows of the launch, and where they go.
        """
        size = launch.nbytes
        with self._lock:
            if not self._is_open:
                return
            self._queued_bytes += size
            self._thread.submit(self._write, self._epoch, launch, writes, size)

    def read(self, read: TierRead) -> None:
        """Begin to read blocks; returns at once."""
        with self._lock:
            if self._is_open:
                self._reads.add(read)
                self._thread.submit(self._read, read)
                return
        read.finish()

    def forget_all(self) -> None:
        """Drop the pending writes, and refuse reads of blocks written before."""
        with self._lock:
            self._epoch += 1
            if self._is_open:
                self._thread.submit(self._file.forget_all)

    def fresh(self) -> tuple[bool, list[StoredBlock]]:
        """Return what another process wrote, see `BlockFile.fresh`."""
        try:
            return self._file.fresh() if self._is_open else (False, [])
        except OSError as error:
            self._fail(error)
            return False, []

    @property
    def writes(self) -> bool:
        """Tell whether this process writes the blocks."""
        return self._file.writes

    def give_back(self, place: int, num_bytes: int) -> None:
        """Free memory whose blocks were dropped, once all that was asked before is done."""
        with self._lock:
            if self._is_open:
                self._thread.submit(self._file.give_back, place, num_bytes)

    def close(self) -> None:
        """End the thread after its current job and free its space; calling it twice is harmless.

        What is queued is neither written nor read: reads end with nothing found. Where the disk hangs, closing waits
        for it `CLOSE_SECONDS`; the space is given back when it answers.
        """
        with self._lock:
            self._is_open = False
            if self._ended is None:
                try:
                    self._ended = self._thread.submit(self._file.close)  # after all that is queued, which is dropped
                except RuntimeError:  # the interpreter ends, and has waited for the thread
                    self._file.close()
                    return
                self._thread.shutdown(wait=False)
        if threading.get_ident() == self._ident:
            return  # the garbage collector may close an engine in any thread, and this one cannot wait for itself
        try:
            self._ended.result(CLOSE_SECONDS)
        except TimeoutError:
            logger.warning("the %s tier did not end within %g s: it is left to itself", self.name, CLOSE_SECONDS)
            with self._lock:
                for read in self._reads:
                    read.finish()
                self._reads.clear()

    def _write(self, epoch: int, launch: jax.Array, writes: Sequence[tuple[int, TierWrite]], size: int) -> None:
        self._ident = threading.get_ident()
        try:
            if epoch == self._epoch and self._is_open:
                rows = block_bytes(np.asarray(launch))
                for row, write in writes:
                    self._file.write(write.place, write.name, rows[:, row], write.stored)
        except OSError as error:
            self._fail(error)
        except Exception:  # the step before failed, and what was copied out of the pool with it
            logger.debug("%d blocks were not written to %s", len(writes), self.name, exc_info=True)
            for _, write in writes:  # else bytes of other blocks might be taken for those of an older one
                self._file.forget(write.place)
        finally:
            with self._lock:
                self._queued_bytes -= size

    def _read(self, read: TierRead) -> None:
        self._ident = threading.get_ident()
        start = time.perf_counter()
        contents: dict[tuple[int, bytes], np.ndarray] = {}
        damaged: list[StoredBlock] = []
        try:
            for block in read.blocks if self._is_open else ():
                self._file.will_read(block.place, block.num_bytes)
            for block, name in zip(read.blocks, read.names, strict=True):
                if read.is_cancelled or not self._is_open:
                    break
                try:
                    contents[block.group, block.digest] = self._file.read(block.place, name, block.num_bytes)
                except DamagedBlock:
                    damaged.append(block)
        except OSError as error:
            self._fail(error)
        except Exception:
            logger.exception("blocks cannot be read from %s", self.name)
            damaged = [b for b in read.blocks if (b.group, b.digest) not in contents]
        finally:
            with self._lock:
                if read in self._reads:  # else it was given up, and nothing of it may change any more
                    self._reads.remove(read)
                    read.contents.update(contents)
                    read.damaged += damaged
                    read.seconds = time.perf_counter() - start
                    read.finish()

    def _fail(self, error: OSError) -> None:
        if self._is_open:
            logger.warning("the %s tier is off from now on: %s", self.name, error)
        self._is_open = False

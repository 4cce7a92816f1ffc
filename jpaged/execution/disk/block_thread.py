"""One thread that writes blocks to a file and reads them, while the engine goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from jpaged.execution.disk.block_file import BlockFile, DamagedBlock
from jpaged.execution.host_store import block_bytes
from jpaged.memory.disk import DiskRead, DiskWrite

logger = logging.getLogger(__name__)


class BlockThread:
    """Does what it is asked in that order, so that a read finds what was asked to be written before.

    An error of the disk closes it: what is asked from then on finds nothing. So does `close`.
    """

    def __init__(self, file: BlockFile) -> None:
        self._file = file
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jpaged-disk")
        self._lock = threading.Lock()
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
        """Return the size of the launches that are not on disk yet."""
        return self._queued_bytes

    def write(self, launch: jax.Array, writes: Sequence[DiskWrite]) -> None:
        """Write the blocks of a launch, [shards, blocks, ...], once the device is done with it; returns at once."""
        size = launch.nbytes
        with self._lock:
            if not self._is_open:
                return
            self._queued_bytes += size
            self._thread.submit(self._write, self._epoch, launch, writes, size)

    def read(self, read: DiskRead) -> None:
        """Begin to read blocks; returns at once."""
        with self._lock:
            if self._is_open:
                self._thread.submit(self._read, read)
                return
        read.finish()

    def forget_all(self) -> None:
        """Drop what is still to be written, and let nothing be read that was."""
        with self._lock:
            self._epoch += 1
            if self._is_open:
                self._thread.submit(self._file.forget_all)

    def close(self) -> None:
        """End the thread after what it does just now, and give the disk's space back; again is no error."""
        with self._lock:
            self._is_open = False
        here = threading.get_ident() == self._ident  # the garbage collector may close an engine in any thread
        self._thread.shutdown(wait=not here, cancel_futures=True)
        if not here:
            self._file.close()

    def _write(self, epoch: int, launch: jax.Array, writes: Sequence[DiskWrite], size: int) -> None:
        self._ident = threading.get_ident()
        try:
            if epoch == self._epoch and self._is_open:
                rows = block_bytes(np.asarray(launch))
                for row, write in enumerate(writes):
                    self._file.write(write.place, write.name, rows[:, row])
        except OSError as error:
            self._fail(error)
        except Exception:  # the step before failed, and what was copied out of the pool with it
            logger.debug("%d blocks were not written to disk", len(writes), exc_info=True)
        finally:
            with self._lock:
                self._queued_bytes -= size

    def _read(self, read: DiskRead) -> None:
        self._ident = threading.get_ident()
        start = time.perf_counter()
        try:
            for block in read.blocks:
                self._file.will_read(block.place, block.num_bytes)
            for block, name in zip(read.blocks, read.names, strict=True):
                if read.is_cancelled or not self._is_open:
                    break
                try:
                    content = self._file.read(block.place, name, block.num_bytes)
                    read.contents[block.group, block.digest] = content
                except DamagedBlock:
                    read.damaged.append(block)
        except OSError as error:
            self._fail(error)
        except Exception:
            logger.exception("blocks cannot be read from disk")
            read.damaged += [b for b in read.blocks if (b.group, b.digest) not in read.contents]
        finally:
            read.seconds = time.perf_counter() - start
            read.finish()

    def _fail(self, error: OSError) -> None:
        if self._is_open:
            logger.warning("the disk tier is off from now on: %s", error)
        self._is_open = False

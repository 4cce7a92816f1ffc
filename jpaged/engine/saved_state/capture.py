"""Captures the state of an engine between two steps; the slow work is left to the thread that writes it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from jpaged.engine.engine import Engine
from jpaged.engine.interrupts import signals_held
from jpaged.engine.saved_state.incremental import LastSave
from jpaged.execution.transfer.pool_blocks import BlockCopies
from jpaged.memory.saving import held_blocks, memory_data
from jpaged.scheduling.held import SavedArrays
from jpaged.scheduling.saving import request_data, scheduler_data
from jpaged.text.input_processor import InputProcessor


@dataclass(frozen=True)
class Capture:
    """A copy of an engine's state; the engine may go on.

    Attributes:
        host: plain data, see `capture`.
        copies: content of the pool's changed blocks, on its way to the host; None if no block has changed.
        written: the other blocks in the previous save.
        swapped: content of each replica's swapped blocks, by group.
        num_requests: number of requests, including finished ones that their callers have not released.
        pause_seconds: how long the engine paused.
    """

    host: dict[str, Any]
    copies: BlockCopies | None
    written: LastSave
    swapped: list[list[np.ndarray]]
    num_requests: int
    pause_seconds: float

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the content of all blocks by the names of `pool_array` and `host_array`; call it only once.

        Raises:
            StateRefused: the previous save is damaged or gone.
        """
        found: dict[str, np.ndarray] = {}
        changed = None if self.copies is None else self.copies.arrays()
        for replica, groups in enumerate(self.written.rows):
            for group in range(len(groups)):
                name = pool_array(replica, group)
                parts = self.written.arrays(name, groups[group])
                parts += [] if changed is None else [changed[replica][group]]
                if parts:
                    found[name] = np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
        for replica, contents in enumerate(self.swapped):
            found |= {host_array(replica, group): array for group, array in enumerate(contents)}
        return {name: array for name, array in found.items() if array.size}


def pool_array(replica: int, group: int) -> str:
    """Return the name of the array that holds a replica's blocks of one group."""
    return f"pool_{replica}_{group}"


def host_array(replica: int, group: int) -> str:
    """Return the name of the array that holds a replica's swapped blocks of one group."""
    return f"swapped_{replica}_{group}"


def capture(engine: Engine, inputs: InputProcessor, before: LastSave | None = None) -> Capture:
    """Read back all steps in flight and copy the state. Only the thread that holds the engine may call it.

    The plain data are: "inputs", ids and seeds; "requests", all awaited requests with their parts, but for those of
    vectors, which no caller could take up; "pins", the requests that compute pinned prefixes, and "pin_seconds" how
    long each stays; "pictures", the encoder inputs of the images of both, not copied as they never change; and
    "replicas", for each replica its memory, its queues, its lost pins, and its blocks in the order of the arrays.

    Args:
        before: this engine's blocks in the previous save; blocks that are still cached under the same name have the
            same content and are not copied again.
    """
    start = time.perf_counter()
    engine.settle()
    engine.prefixes.stop()
    worker, now = engine.runner.worker, time.monotonic()
    with signals_held:
        memories = [memory_data(replica.memory) for replica in engine.replicas]
        written, held, changed = (before or LastSave()).split(memories, [held_blocks(memory) for memory in memories])
        copies = worker.blocks.read(worker.pool, changed) if any(some for mine in changed for some in mine) else None
        host_blocks = [[_owned(owners) for owners in memory["host"]["owners"]] for memory in memories]
        swapped = [worker.host.contents(number, mine) if any(mine) else [] for number, mine in enumerate(host_blocks)]
        replicas = [
            {
                "memory": memory,
                "scheduler": scheduler_data(replica.scheduler),
                "lost_pins": sorted(replica.pins.lost),
                "held": held[number],
                "host_blocks": host_blocks[number],
            }
            for number, (replica, memory) in enumerate(zip(engine.replicas, memories, strict=True))
        ]
        pictures = SavedArrays()
        host = {
            "inputs": inputs.data(),
            "requests": [
                request_data(request, now, pictures)
                for request in engine.requests.awaited.values()
                if request.pooling is None
            ],
            "pins": {
                seq_id: request_data(request, now, pictures) for seq_id, request in engine.prefixes.requests.items()
            },
            "pin_seconds": {seq_id: engine.prefixes.seconds_left(pin) for seq_id, pin in engine.prefixes.held.items()},
            "pictures": pictures.data(),
            "replicas": replicas,
        }
    return Capture(host, copies, written, swapped, len(host["requests"]), time.perf_counter() - start)


def _owned(owners: list[int]) -> list[int]:
    return [block for block, count in enumerate(owners) if count]

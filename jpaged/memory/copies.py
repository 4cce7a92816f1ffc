"""Copies that a step asks of the device, each of one whole block."""

from __future__ import annotations

from typing import NamedTuple


class BlockCopy(NamedTuple):
    """A copy-on-write: the device copies `src` to `dst` in every layer of the group before the step writes.

    The copies of one step can be made in any order, as no destination is another's source or destination. When
    a request is freed while the step is planned, its copies must be dropped: their blocks go to others.
    """

    group: int
    src: int
    dst: int


class SwapCopy(NamedTuple):
    """A whole block that moves to the host or back; the list it is in says which."""

    group: int
    device_block: int
    host_block: int


class HostBlock(NamedTuple):
    """A place for one block of a group in host memory."""

    group: int
    block: int

"""Defines the interface of checkpoint formats to the weight loader: tensors by Hugging Face name, read lazily."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jpaged.model_api import HostArray


@dataclass(frozen=True)
class StoredAs:
    """Describes a checkpoint's contents; the attributes are those of `TensorReader`."""

    stored_dtype: np.dtype
    quantised: bool

    def dtype(self, name: str) -> np.dtype:
        """Return the floating type in which a tensor is assumed to be stored."""
        return np.dtype(np.float32) if self.quantised else self.stored_dtype


class TensorReader(Protocol):
    """Lazily reads one checkpoint. `read` is called from several threads at once."""

    location: str
    """The checkpoint's file or folder, for messages."""

    stored_dtype: np.dtype
    """Floating type holding most of the weights; float32 when they are quantised."""

    quantised: bool
    """True if the checkpoint is quantised; `read` then dequantises."""

    def names(self) -> Iterable[str]:
        """Return the Hugging Face names of all tensors, in file order."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, without reading it. Raises KeyError like `read`."""
        ...

    def dtype(self, name: str) -> np.dtype:
        """Return the floating type that a tensor is stored in, without reading it; float32 where it is quantised.
        Raises KeyError like `read`."""
        ...

    def read(self, name: str) -> np.ndarray | HostArray:
        """Return one tensor as stored, or dequantised to float32; it may be a read-only view of the file, read when it
        is used.

        Raises:
            KeyError: when the checkpoint has no such tensor.
        """
        ...

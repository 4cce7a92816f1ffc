"""Reads a checkpoint whose tensors are renamed to the names that the families know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jpaged.loading.tensor_reader import TensorReader
from jpaged.loading.weight_formats.stored_codes import CodedReader, Encoding, SpreadCodes
from jpaged.loading.weight_formats.weight_format import WeightFormat
from jpaged.model_api import HostArray


class RenamedTensors:
    """Reads a checkpoint, quantised or not, as a `CodedReader` under new names; see there for the methods' contract.

    Args:
        stored: the checkpoint's name of each tensor, by its new name.
    """

    def __init__(self, whole: TensorReader, stored: Mapping[str, str]):
        self._whole, self._stored = whole, stored
        self.location, self.stored_dtype, self.quantised = whole.location, whole.stored_dtype, whole.quantised
        self.keeps_codes = isinstance(whole, CodedReader) and whole.keeps_codes

    def names(self) -> Iterable[str]:
        return self._stored.keys()

    def stored_name(self, name: str) -> str:
        """Return the checkpoint's name of a tensor.

        Raises:
            KeyError: there is none of this new name.
        """
        return self._stored[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._whole.shape(self.stored_name(name))

    def dtype(self, name: str) -> np.dtype:
        return self._whole.dtype(self.stored_name(name))

    def read(self, name: str) -> np.ndarray | HostArray:
        return self._whole.read(self.stored_name(name))

    def encodings(self, name: str) -> Sequence[Encoding]:
        return self._whole.encodings(self.stored_name(name)) if isinstance(self._whole, CodedReader) else []

    def spread_codes(self, name: str, form: WeightFormat) -> SpreadCodes:
        assert isinstance(self._whole, CodedReader), name
        return self._whole.spread_codes(self.stored_name(name), form)

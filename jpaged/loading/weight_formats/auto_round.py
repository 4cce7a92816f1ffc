"""Reads checkpoints of AutoRound (Cheng et al., 2023), whose codes lie as GPTQ's or AWQ's do.

``packing_format`` says which: ``auto_round:auto_gptq`` is GPTQ's first version, ``auto_round`` and
``auto_round:gptqmodel`` its second, ``auto_round:auto_awq`` AWQ. ``extra_config`` maps modules' names or patterns to
settings that differ; 16 bits leave weights plain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.loading.safetensors_reader import SafetensorsWeights
from jpaged.loading.weight_formats.awq import AWQ
from jpaged.loading.weight_formats.coded_folder import StoredMatrices
from jpaged.loading.weight_formats.gptq import GPTQ
from jpaged.loading.weight_formats.settings import flag, own_settings, shown
from jpaged.loading.weight_formats.stored_codes import Encoding

_PLAIN_BITS = 16


class AutoRound:
    """Describes the method ``auto-round``; see `jpaged.loading.weight_formats.methods.Method`.

    Raises:
        ValueError: a packing or a setting is not read.
    """

    families: Sequence[str] | None = None

    def __init__(self, fields: Mapping[str, Any]):
        packing = fields.get("packing_format") or "auto_round"
        if not isinstance(packing, str) or packing not in PACKINGS:
            raise ValueError(f"packing_format={shown(packing)} is none of {', '.join(PACKINGS)}, which are read")
        kind = fields.get("data_type") or "int"
        if kind not in ("int", "int_sym", "int_asym"):
            raise ValueError(f"data_type={shown(kind)} is not int, which is read")
        extra = own_settings(fields, "extra_config")
        symmetric = flag(fields, "sym", True)
        self._method: AWQ | GPTQ
        if PACKINGS[packing] is None:
            others = [name for name, own in extra.items() if own.get("bits", _PLAIN_BITS) != _PLAIN_BITS]
            if others:
                raise ValueError(f"extra_config={others[0]!r} gives modules other settings, which AWQ does not have")
            plain = list(extra)
            self._method = AWQ({**fields, "zero_point": True, "version": "gemm", "modules_to_not_convert": plain})
            return
        dynamic = {
            f"-:{name}$" if own.get("bits", fields.get("bits")) == _PLAIN_BITS else f"+:{name}$": own
            for name, own in extra.items()
        }
        stored = {"checkpoint_format": PACKINGS[packing], "desc_act": False, "dynamic": dynamic}
        self._method = GPTQ({**fields, "sym": symmetric, **stored})

    def encoding_by_name(self, name: str) -> Encoding | None:
        return self._method.encoding_by_name(name)

    def matrices(self, weights: SafetensorsWeights) -> StoredMatrices:
        return self._method.matrices(weights)


PACKINGS = {
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:auto_gptq": "gptq",
    "auto_round:auto_awq": None,
}
"""The version of GPTQ of each packing; None = AWQ."""

"""Tells which instructions the loops on CPU may use, and the sizes that follow from them. Imports no Numba.

They are those of the library that was compiled ahead, where one is used (`cpu_objects`): its loops and those that Numba
adds then agree. Otherwise they are the processor's, or what ``NUMBA_CPU_FEATURES`` says, for which Numba compiles.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from functools import cache
from typing import Literal, TypeAlias

from pallas_kernels import cpu_objects


def _features() -> dict[str, bool]:
    """Return features by LLVM's names; none where it cannot tell."""
    objects = cpu_objects.loaded()
    if objects is not None:
        return dict.fromkeys(objects.features, True)
    given = os.environ.get("NUMBA_CPU_FEATURES")
    if given:
        return {name[1:]: name[0] == "+" for name in given.split(",") if name}
    try:
        from llvmlite import binding  # comes with Numba
    except ImportError:
        return {}
    try:
        return dict(binding.get_host_cpu_features())
    except RuntimeError:
        return {}


FEATURES = _features()
"""Features that the loops may use."""
MANY_REGISTERS = any(FEATURES.get(name) for name in ("avx512f", "neon"))
"""True if there are 32 vector registers; otherwise there are 16."""
LANES = 16 if FEATURES.get("avx512f") else 8 if FEATURES.get("avx") else 4
"""Float32 numbers in a vector register."""

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


def has(*names: str) -> bool:
    """Tell whether there are all of these features."""
    return all(FEATURES.get(name) for name in names)


@cache
def has_amx() -> bool:
    """Tell whether there is AMX for bfloat16 and int8 and Linux lets this process use it; asks for it once.

    Linux refuses, for instance, where a thread's stack for signals is too small for the tiles. Later threads have the
    permission too.
    """
    if not has("amx-tile", "amx-bf16", "amx-int8"):
        return False
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


Kind: TypeAlias = Literal["amx", "vnni512", "vnni256", "avx2", "avx2 widened", "avx2 nibbles", "neon", "plain"]
"""Kinds of integer products, see `pallas_kernels.cpu_dots`."""
PairKind: TypeAlias = Literal["amx", "avx512bf16", "widened", "neon"]
"""Kinds of products of bfloat16, see `pallas_kernels.bfloat16_matmul.cpu_pairs`."""
MOST_OF_NIBBLES = 32
"""Inputs of a group of codes of 4 bits whose products 16 bits hold, of each output in two sums."""


def kinds_here() -> tuple[Kind, ...]:
    """Return the kinds of integer products that this machine has, best first."""
    vnni512 = has("avx512vnni", "avx512bw")
    here: dict[Kind, bool] = {
        "amx": vnni512 and has_amx(),
        "vnni512": vnni512,
        "vnni256": has("avx512vnni", "avx512vl") or has("avxvnni"),
        "avx2": has("avx2"),
        "neon": has("dotprod"),
        "plain": True,
    }
    return tuple(kind for kind, is_here in here.items() if is_here)


def kind_for(kind: Kind, group: int, *, packed: bool, grouped: bool = True) -> Kind:
    """Return the kind that multiplies codes in groups of `group` inputs on machines of a kind.

    Eight products of pairs of 4 bits and 8 are at most 8 x 2 x 15 x 127, which 16 bits hold. AMX multiplies bytes, a
    group of inputs at a time.
    """
    if kind == "amx" and (packed or not grouped):
        return "vnni512"
    return "avx2 nibbles" if kind == "avx2" and packed and group <= MOST_OF_NIBBLES else kind


def best_kind() -> Kind:
    """Return the kind of integer products that is fastest here."""
    return kinds_here()[0]


def kind_in_registers(kind: Kind) -> Kind:
    """Return the kind whose sums are in vector registers: AMX has others for few rows."""
    return "vnni512" if kind == "amx" else kind


def pair_kinds_here() -> tuple[PairKind, ...]:
    """Return the kinds of products of bfloat16 that this machine has, best first."""
    here: dict[PairKind, bool] = {
        "amx": has_amx(),
        "avx512bf16": has("avx512bf16"),
        "neon": has("bf16", "neon"),
        "widened": True,
    }
    return tuple(kind for kind, is_here in here.items() if is_here)


def best_pair_kind() -> PairKind:
    """Return the kind of products of bfloat16 that is fastest here."""
    return pair_kinds_here()[0]

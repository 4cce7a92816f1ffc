"""Lists the quantised forms that models are written in; a command checks them before it imports jax."""

from __future__ import annotations

from jpaged.validation import one_of

WRITTEN = ("compressed-tensors", "awq", "gptq")
GROUPS = (32, 64, 128)


def check_form(method: str, bits: int, group_size: int) -> None:
    """Raise ValueError if matrices are not written so; names the argument."""
    one_of("format", method, WRITTEN)
    if bits not in (4, 8) or (method == "awq" and bits != 4):
        raise ValueError(f"bits={bits!r} is not written as {method}: 4{'' if method == 'awq' else ' and 8'} are")
    if group_size not in GROUPS:
        raise ValueError(f"group_size={group_size!r} is none of {', '.join(map(str, GROUPS))}")

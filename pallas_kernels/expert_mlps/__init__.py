"""Sums the MLPs of each token's experts in one launch, from matrices that stay where they are stacked.

XLA's grouped product (`jax.lax.ragged_dot`) is a custom call on TPUs. In a loop over stacked layers it is given a copy
of a layer's matrices, which moves them three times, and rows are sorted, gathered and scattered around it. `tpu` reads
each expert's matrices once, those of experts that no token chose never, and sorts nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jaxtyping import Array, Float

from pallas_kernels.expert_mlps import tpu
from pallas_kernels.expert_mlps.reference import Biases, DenseChoice, dense_choice, expert_mlps_reference
from pallas_kernels.expert_mlps.tpu_route import route, takes_logits
from pallas_kernels.platform import Impl
from pallas_kernels.stacked_row import StackedTable

__all__ = ["Biases", "DenseChoice", "dense_choice", "expert_mlps", "route", "takes", "takes_logits"]


def takes(
    x: jax.Array,
    gate_up: StackedTable,
    down: StackedTable,
    impl: Impl,
    *,
    experts: int,
    column_shards: int = 1,
    biased: int = 0,
) -> bool:
    """Tell whether `expert_mlps` computes this in one launch, on each of the shards of MLPs' columns.

    Args:
        experts: how many tokens choose from, on all devices.
        biased: experts on a device whose biases are added.
    """
    return impl in ("tpu", "tpu_interpret") and tpu.takes(x, gate_up.stack, down.stack, experts, column_shards, biased)


def expert_mlps(
    x: Float[Array, "tokens embed"],
    choice: DenseChoice,
    gate_up: StackedTable,
    down: StackedTable,
    activate: Callable[..., Array],
    *,
    gated: bool = True,
    biases: Biases | None = None,
    impl: Impl = "tpu",
) -> Float[Array, "tokens embed"]:
    """Return ``sum_e share_e * activate(x @ gate_e, x @ up_e) @ down_e`` over each token's experts.

    Gate, up and their product are rounded to the dtype of `x`; shares and sums are not, but in a launch for more than
    128 tokens each expert's result is. A token's bits do not depend on the other tokens of as large a launch.

    Args:
        gate_up: [layers, experts, embed, 2 * mlp], gate's columns before those of up; [layers, experts, embed, mlp] of
            up alone where MLPs are not `gated`, which compute ``activate(x @ up_e)``.
        down: [layers, experts, mlp, embed or more]; columns beyond the tokens' are left out. Its layer has the number
            of gate_up's, as that of the biases.
        activate: is given gate and up, or up alone, in any dtype and of any number of columns.
        biases: are added to both products.
        impl: ``tpu`` needs unsharded operands and what `tpu.takes` names; all others are the reference.
    """
    biased = 0 if biases is None else down.shape[0]
    if takes(x, gate_up, down, impl, experts=len(choice.share), biased=biased):
        return tpu.expert_mlps(
            x, choice, gate_up, down, activate, gated=gated, biases=biases, interpret=impl == "tpu_interpret"
        )
    return expert_mlps_reference(x, choice, gate_up.read(), down.read(), activate, gated=gated, biases=biases)

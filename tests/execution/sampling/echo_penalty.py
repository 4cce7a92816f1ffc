"""An edit of logits that `jpaged` lacks, in one file: a penalty on repeating the newest token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jpaged.execution.mesh import HostOrDevice
from jpaged.execution.sampling.edit import Edit, history_of, newest, pending_row
from jpaged.sampling_params import SamplingParams, parameter
from jpaged.scheduling import Request, Sample
from jpaged.validation import real


@dataclass(kw_only=True)
class EchoParams(SamplingParams):
    """Parameters with `echo_penalty`: a number subtracted from the logit of the newest token; in [0, 100]."""

    echo_penalty: float = parameter(0.0, real(0.0, 100.0), "edit")


class EchoRows(NamedTuple):
    """Holds what is subtracted from the logit of each row's newest token.

    Attributes:
        penalty: 0 = nothing.
        last: the newest token where the host knows it; elsewhere any token.
        pending: where in the last step's samples it lies where the host does not; -1 where it does.
    """

    penalty: Float[HostOrDevice, " seqs"]
    last: Int[HostOrDevice, " seqs"]
    pending: Int[HostOrDevice, " seqs"]


class EchoPenalty(Edit[EchoRows]):
    """Subtracts a penalty from the logit of the token that came last."""

    fields = ("echo_penalty",)
    arrays = EchoRows

    def asks(self, request: Request) -> bool:
        return getattr(request.params, "echo_penalty", 0.0) > 0

    def blank(self, width: int, vocab_size: int) -> EchoRows:
        return EchoRows(np.zeros(width, np.float32), np.zeros(width, np.int32), np.full(width, -1, np.int32))

    def fill(self, rows: Sequence[int], samples: Sequence[Sample], blank: EchoRows) -> EchoRows:
        filled = EchoRows(*map(np.array, blank))
        for row in rows:
            history = history_of(samples[row])
            filled.penalty[row] = samples[row].request.params.echo_penalty
            filled.last[row], filled.pending[row] = history[-1], pending_row(samples[row], history)
        return filled

    def edit(
        self, logits: Float[Array, "seqs vocab"], arrays: EchoRows, last_tokens: Int[Array, " max_seqs"]
    ) -> Float[Array, "seqs vocab"]:
        token = jnp.where(arrays.pending >= 0, newest(arrays.pending, last_tokens), arrays.last)
        return logits.at[jnp.arange(len(token)), token].add(-arrays.penalty)

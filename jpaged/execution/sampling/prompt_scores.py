"""Scores prompt tokens: the head runs over a chunk's hidden states, a fixed number of rows at a time.

The logits of a whole chunk, ``[tokens, vocab]``, never exist.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jpaged.execution.mesh import HostOrDevice
from jpaged.execution.sampling.sampler import rank
from jpaged.scheduling.step import PromptScore, ScheduledStep
from jpaged.scheduling.top_tokens import TokenRanking, TopTokens

ROWS = 64
"""Tokens scored in one call."""


class ScoreOutput(NamedTuple):
    """Holds the log-probabilities of the targets; the other fields are those of `TopTokens`."""

    logprobs: Float[Array, " rows"]
    ranks: Int[Array, " rows"]
    top_tokens: Int[Array, "rows top"]
    top_logprobs: Float[Array, "rows top"]


def make_score(graphdef: nnx.GraphDef, mesh: Mesh) -> jax.stages.Wrapped:
    """Return ``score(params, hidden, rows, targets, top=...) -> ScoreOutput``: the log-probability of each target at
    the hidden state that it follows, one of ``hidden[rows]``; -inf for what only a prompt can have."""

    def score(
        params: Any,
        hidden: Float[Array, "tokens embed"],
        rows: Int[HostOrDevice, " rows"],
        targets: Int[HostOrDevice, " rows"],
        *,
        top: int,
    ) -> ScoreOutput:
        logits = nnx.merge(graphdef, params).logits(hidden[rows])
        tokens = jnp.asarray(targets)
        chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1, mode="fill", fill_value=-jnp.inf)[:, 0]
        return ScoreOutput(chosen - jax.nn.logsumexp(logits, axis=1), *rank(logits, tokens, top, True))

    return jax.jit(score, static_argnames=("top",), out_shardings=NamedSharding(mesh, PartitionSpec()))


class ScoreRows(NamedTuple):
    """Lists the prompt tokens that a step scores.

    Attributes:
        scores: the score that each token belongs to.
        rows: rows of the step's hidden states; a token is scored at the row before its own.
        targets: the tokens.
    """

    scores: list[PromptScore]
    rows: Int[np.ndarray, " scores"]
    targets: Int[np.ndarray, " scores"]


def score_rows(step: ScheduledStep, query_starts: Int[np.ndarray, " seqs+1"]) -> ScoreRows:
    """Return every prompt token that follows one computed in the step, of the requests that ask for prompt_logprobs."""
    first_row = {chunk.seq.seq_id: int(query_starts[i]) for i, chunk in enumerate(step.chunks)}
    scores, rows = [], []
    for request, chunk in step.scored:
        end = min(chunk.start + chunk.length, len(request.prompt_token_ids) - 1)
        for position in range(chunk.start, end):
            scores.append(PromptScore(request, position + 1))
            rows.append(first_row[chunk.seq.seq_id] + position - chunk.start)
    targets = [request.prompt_token_ids[position] for request, position in scores]
    return ScoreRows(scores, np.array(rows, np.int32), np.array(targets, np.int32))


def slices(rows: ScoreRows) -> list[tuple[Int[np.ndarray, " rows"], Int[np.ndarray, " rows"]]]:
    """Return the (rows, targets) of each call, padded to `ROWS` with row 0 and token 0."""
    size = -(-len(rows.scores) // ROWS) * ROWS
    padded = [np.pad(x, (0, size - len(x))).reshape(-1, ROWS) for x in (rows.rows, rows.targets)]
    return list(zip(*padded, strict=True))


@dataclass(frozen=True)
class PromptScores:
    """Holds scores on their way from the device, `fetch`ed as `Worker` says."""

    scores: list[PromptScore]
    outputs: list[ScoreOutput]
    fetch: Callable[[Any], Any]

    def wait(self) -> list[tuple[PromptScore, float, TokenRanking]]:
        """Return each scored token with its log-probability and ranking; blocks until the device is done."""
        if not self.scores:
            return []
        logprobs, *top = (np.concatenate(parts) for parts in zip(*self.fetch(self.outputs), strict=True))
        rankings = TopTokens(*top)
        return [
            (score, float(logprobs[i]), rankings.row(i, score.request.params.prompt_logprobs or 0))
            for i, score in enumerate(self.scores)
        ]

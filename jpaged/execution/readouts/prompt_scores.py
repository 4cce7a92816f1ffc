"""Scores prompt tokens: the head runs over a chunk's hidden states, a fixed number of rows at a time.

The logits of a whole chunk, ``[tokens, vocab]``, never exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jpaged.execution.batch import StepBatch
from jpaged.execution.mesh import HostOrDevice, each_replica, own_sharding, stack
from jpaged.execution.packing import opened
from jpaged.execution.readouts.base import Device, ForwardPass, first_rows, of_replica
from jpaged.execution.sampling.sampler import rank
from jpaged.execution.sampling.sampling_batch import top_size
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

    def scores(params: Any, hidden: Array, rows: Array, targets: Array, *, top: int) -> ScoreOutput:
        return each_replica(partial(score, top=top), mesh, ("shared", "own", "own", "own"), "own")(
            params, hidden, rows, targets
        )

    return jax.jit(scores, static_argnames=("top",), out_shardings=own_sharding(mesh))


class PromptScores:
    """Holds the scores of all replicas' steps on their way from the device, `fetch`ed as `Worker` says.

    Args:
        rows: what each replica's step scores.
        outputs: of each call, see `ScoreOutput`.
    """

    field = "scores"

    def __init__(self, rows: Sequence[ScoreRows], outputs: list[ScoreOutput], fetch: Callable[[Any], Any]) -> None:
        self._rows = rows
        self._outputs = outputs
        self._fetch = fetch

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, ...]:
        """Return the fields of `ScoreOutput`, each over the rows of all calls."""
        axis = 0 if len(self._rows) == 1 else 1
        return tuple(np.concatenate(parts, axis) for parts in zip(*self._fetch(self._outputs), strict=True))

    def wait(self, replica: int) -> list[tuple[PromptScore, float, TokenRanking]]:
        """Return each scored token of a replica with its log-probability and ranking; blocks until the device is
        done."""
        scores = self._rows[replica].scores
        if not scores:
            return []
        logprobs, *top = (of_replica(array, replica, len(self._rows)) for array in self._arrays)
        rankings = TopTokens(*top)
        return [
            (score, float(logprobs[i]), rankings.row(i, score.request.params.prompt_logprobs or 0))
            for i, score in enumerate(scores)
        ]


class PromptScoring:
    """Scores the prompts of requests that ask for prompt_logprobs, `ROWS` tokens a call.

    Args:
        mesh: the engine's devices.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def start(self, device: Device, forward: ForwardPass) -> PromptScores | None:
        """Score every prompt token that follows one computed in the pass."""
        scored = [request for step in forward.steps for request, _ in step.scored]
        if not scored:
            return None
        top = top_size(max(request.params.prompt_logprobs or 0 for request in scored))
        rows = [score_rows(step, opened(batch)) for step, batch in zip(forward.steps, forward.batches, strict=True)]
        calls = -(-max(len(each.scores) for each in rows) // ROWS)
        outputs = []
        for call in zip(*(slices(each, calls) for each in rows), strict=True):
            of_all, targets = stack(self._mesh, call)
            outputs.append(device.score(of_all, targets, top))
        return PromptScores(rows, outputs, device.fetch)


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


def score_rows(step: ScheduledStep, batch: StepBatch) -> ScoreRows:
    """Return every prompt token that follows one computed in the step, of the requests that ask for prompt_logprobs."""
    first_row = first_rows(step, batch)
    scores, rows = [], []
    for request, chunk in step.scored:
        end = min(chunk.start + chunk.length, len(request.prompt_token_ids) - 1)
        for position in range(chunk.start, end):
            scores.append(PromptScore(request, position + 1))
            rows.append(first_row[chunk.seq.seq_id] + position - chunk.start)
    targets = [request.prompt_token_ids[position] for request, position in scores]
    return ScoreRows(scores, np.array(rows, np.int32), np.array(targets, np.int32))


def slices(rows: ScoreRows, calls: int) -> list[tuple[Int[np.ndarray, " rows"], Int[np.ndarray, " rows"]]]:
    """Return the (rows, targets) of each of some calls, padded to `ROWS` with row 0 and token 0."""
    size = calls * ROWS
    padded = [np.pad(x, (0, size - len(x))).reshape(-1, ROWS) for x in (rows.rows, rows.targets)]
    return list(zip(*padded, strict=True))

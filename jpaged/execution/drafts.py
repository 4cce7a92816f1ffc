"""Draws drafts on the device: a smaller program runs before the step that verifies its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flax import nnx

from jpaged.execution.batch import StepBatch
from jpaged.execution.compile.buckets import Bucket
from jpaged.execution.sampling.sampler import SamplingArrays
from jpaged.execution.sampling.sampling_batch import RANKED, sampling_arrays, with_room
from jpaged.model_api import DraftBlock
from jpaged.scheduling.step import Chunk, Sample, ScheduledStep

DraftOnce = Callable[[StepBatch, Bucket, SamplingArrays, int], list[int]]
"""Runs the drafting program on a batch and draws after each of its tokens; blocks until the tokens are there."""


@dataclass(frozen=True)
class DraftProgram:
    """Names the model that drafts, or the head.

    Attributes:
        graphdef: the model without its weights.
        params: its weights, on the engine's mesh; None = those of the engine's model, of whose first layers it is made.
        prefix: what the names of its layer groups begin with in the pool; "" = they are those of the engine's model,
            whose KV it shares.
        tables: attributes of a `jpaged.model_api.DraftHead` whose parameters are the engine's model's, and are not in
            `params`; None = it is no such head, and reads no hidden states.
        taps: see `jpaged.model_api.Tappable`; () = a head reads the model's final hidden states.
        block: see `jpaged.model_api.DraftHead`.
    """

    graphdef: nnx.GraphDef
    params: Any = None
    prefix: str = ""
    tables: tuple[str, ...] | None = None
    taps: tuple[int, ...] = ()
    block: DraftBlock | None = None

    @property
    def has_groups(self) -> bool:
        """Tell whether the pool keeps something for it, so that it must compute every token that the model computes."""
        return self.prefix != ""


class Drafter:
    """Makes the drafts that a step has none of yet.

    Every draft is drawn as the model would draw it: with the sequence's own clocks at its position (the same race, run
    on other logits, has the same winner as often as not) and with all edits of the logits, as the host knows the tokens
    before it. A pass draws one token of every sequence, or all drafts of each where the drafter makes blocks; the KV it
    writes is overwritten by the step.

    Args:
        build: see `BatchBuilder.build`.
        bucket: finds the bucket of a number of tokens of a number of sequences.
        rows: finds the numbers of rows that the sampler is compiled for and that hold a number of samples.
        most: sequences that one pass can hold, of one token each.
        draft: runs a pass.
        block: see `jpaged.model_api.DraftHead`.
    """

    def __init__(
        self,
        build: Callable[[ScheduledStep, Bucket], StepBatch],
        bucket: Callable[[int, int], Bucket],
        rows: Callable[[int], Sequence[int]],
        vocab_size: int,
        most: int,
        draft: DraftOnce,
        block: DraftBlock | None = None,
    ) -> None:
        self._build = build
        self._bucket = bucket
        self._rows = rows
        self._vocab_size = vocab_size
        self._most = most
        self._draft = draft
        self._block = block

    def fill(self, step: ScheduledStep) -> ScheduledStep:
        """Return the step with all its drafts; its block copies have been made."""
        if self._block is not None:
            return self._fill_at_once(step, self._block.mask_token)
        requests = {sample.seq.seq_id: sample.request for sample in step.samples}
        found: dict[int, tuple[int, ...]] = {chunk.seq.seq_id: () for chunk in step.undrafted}
        while waiting := [c for c in step.undrafted if len(found[c.seq.seq_id]) < len(c.drafts)]:
            waiting = waiting[: self._most]
            passed = ScheduledStep()
            for chunk in waiting:
                drafts = found[chunk.seq.seq_id]
                position = chunk.start + len(drafts)
                passed.others.append(Chunk(chunk.seq, position, 1, -1, chunk.tables, drafts[-1:]))
                so_far = Chunk(chunk.seq, chunk.start, 1 + len(drafts), -1, None, drafts)
                passed.other_samples.append(Sample(requests[chunk.seq.seq_id], chunk.seq, so_far))
            for chunk, token in zip(waiting, self._pass(passed, passed.other_samples), strict=True):
                found[chunk.seq.seq_id] += (token,)
        return step.drafted(found)

    def _fill_at_once(self, step: ScheduledStep, mask_token: int) -> ScheduledStep:
        """Fill in all drafts by one pass over blocks, which are the step's chunks with masks in the place of drafts.

        The edits of a draft's logits see masks in the place of the drafts before it, as none of them is known yet.
        """
        requests = {sample.seq.seq_id: sample.request for sample in step.samples}
        passed, drawn = ScheduledStep(), list[Sample]()
        for chunk in step.undrafted:
            masks, request = (mask_token,) * len(chunk.drafts), requests[chunk.seq.seq_id]
            block = chunk._replace(source_row=-1, drafts=masks)
            passed.others.append(block)
            before, *at_masks = block.prefixes
            passed.other_samples.extend(Sample(request, chunk.seq, each) for each in at_masks)
            drawn += (Sample(request, chunk.seq, each) for each in (before, *at_masks[:-1]))
        tokens = iter(self._pass(passed, drawn))
        found = {c.seq.seq_id: tuple(next(tokens) for _ in c.drafts) for c in passed.others}
        return step.drafted(found)

    def _pass(self, step: ScheduledStep, drawn: list[Sample]) -> list[int]:
        """Return the tokens that are drawn from the states of a step's samples, as those of `drawn` would be."""
        bucket = self._bucket(step.num_tokens, len(step.chunks))
        args = with_room(self._rows(len(drawn)), lambda rows: sampling_arrays(drawn, rows, self._vocab_size))
        args.ranked[:] = False
        batch = self._build(step, bucket)._replace(reads_all=None)  # what drafts leaves no row out
        tokens = self._draft(batch, bucket, args, 0 if args.plain else RANKED)
        return tokens[: len(drawn)]

"""A scheduled step: the plain facts that the scheduler hands to the device, without arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from jpaged.memory import (
        BlockCopy,
        DiskFill,
        DiskWrite,
        HeldAdapter,
        HostBlock,
        StoredAdapter,
        StoredImage,
        SwapCopy,
    )
    from jpaged.scheduling.inputs import Adapter, PromptImage
    from jpaged.scheduling.request import Request, Sequence


UNKNOWN = -1
"""A draft that the device is to make before the step runs."""


class Chunk(NamedTuple):
    """Tokens ``[start, start + length)`` of a sequence to compute.

    A named tuple, not a dataclass: hundreds are made every step.

    Attributes:
        source_row: row of the last step's samples that holds the chunk's last token, which the host has not
            seen; -1 when the host has all tokens.
        tables: the sequence's block tables, one a group, when they changed since its last chunk, else None.
        drafts: guesses of the tokens after the sequence's newest one, or `UNKNOWN`; they are the chunk's last tokens.
    """

    seq: Sequence
    start: int
    length: int
    source_row: int
    tables: list[list[int]] | None
    drafts: tuple[int, ...] = ()

    @property
    def prefixes(self) -> list[Chunk]:
        """Return the chunk cut after the newest token, and after each of its drafts: the last one is the chunk."""
        if not self.drafts:
            return [self]
        known, number = self.length - len(self.drafts), len(self.drafts)
        return [*(self._replace(length=known + i, drafts=self.drafts[:i]) for i in range(number)), self]


class Sample(NamedTuple):
    """A token to draw for `seq` after the last token of `chunk`.

    Where drafts are verified there is a sample for each of `Chunk.prefixes`, in their order.
    """

    request: Request
    seq: Sequence
    chunk: Chunk


class Encode(NamedTuple):
    """An image to encode before the step's chunks run; its features go to the blocks of `stored`."""

    image: PromptImage
    stored: StoredImage


class ImageRead(NamedTuple):
    """Tokens [`start`, `stop`) of a sequence, by position, that take the features of one of the request's images.

    Attributes:
        number: place of the image among the request's.
        blocks: all blocks of the image's features.
    """

    request: Request
    number: int
    seq_id: int
    start: int
    stop: int
    blocks: list[int]

    @property
    def image(self) -> PromptImage:
        """Return the image."""
        return self.request.images[self.number]


class AdapterLoad(NamedTuple):
    """An adapter to be written to the blocks of `stored` before the step's chunks run."""

    adapter: Adapter
    stored: StoredAdapter


class AdapterUse(NamedTuple):
    """A sequence of the step that runs with an adapter, which lies in the blocks of `held`."""

    seq_id: int
    adapter: Adapter
    held: HeldAdapter


class PromptScore(NamedTuple):
    """A prompt token, by its position, whose log-probability a request asks for."""

    request: Request
    position: int


@dataclass(frozen=True)
class ScheduledStep:
    """One iteration. Chunks of one token (decodes) come before longer ones; of these the ones with drafts come first.

    Attributes:
        copies: block copies the device makes before the chunks run.
        preempted: requests whose memory was taken back to make room.
        dropped: host blocks whose content is of no use any more.
        swap_out: blocks the device copies to host memory before anything else of the step.
        swap_in: blocks it copies back after that and before `copies`.
        scored: chunks of requests that ask for prompt_logprobs.
        pooled: chunks of requests that ask for one vector of their prompt, those that it is made of.
        encodes: images that the device encodes before the chunks run.
        reads: the chunks' tokens that stand for images.
        loads: adapters that are written to the pool before the chunks run.
        adapted: the chunks' sequences that run with an adapter.
        to_disk: blocks that the device copies out for the disk before anything else of the step.
        from_disk: blocks that it fills with content read from disk, after `swap_in` and before `copies`.
    """

    chunks: list[Chunk] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    dropped: list[HostBlock] = field(default_factory=list)
    swap_out: list[SwapCopy] = field(default_factory=list)
    swap_in: list[SwapCopy] = field(default_factory=list)
    scored: list[tuple[Request, Chunk]] = field(default_factory=list)
    pooled: list[tuple[Request, Chunk]] = field(default_factory=list)
    encodes: list[Encode] = field(default_factory=list)
    reads: list[ImageRead] = field(default_factory=list)
    loads: list[AdapterLoad] = field(default_factory=list)
    adapted: list[AdapterUse] = field(default_factory=list)
    to_disk: list[DiskWrite] = field(default_factory=list)
    from_disk: list[DiskFill] = field(default_factory=list)

    @property
    def undrafted(self) -> list[Chunk]:
        """Return the chunks whose drafts the device is to make."""
        return [chunk for chunk in self.chunks if chunk.drafts and chunk.drafts[0] == UNKNOWN]

    def drafted(self, drafts: Mapping[int, tuple[int, ...]]) -> ScheduledStep:
        """Return the step with drafts, by seq_id, in the place of `UNKNOWN` ones, as many as there were."""

        def filled(chunk: Chunk) -> Chunk:
            return chunk._replace(drafts=drafts.get(chunk.seq.seq_id, chunk.drafts)[: len(chunk.drafts)])

        samples = [sample._replace(chunk=filled(sample.chunk)) for sample in self.samples]
        return replace(self, chunks=[filled(chunk) for chunk in self.chunks], samples=samples)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    @property
    def num_top(self) -> int:
        """Return how many most likely tokens to find for each sample: the most that any request asks for."""
        return max((request.num_top for request, _, _ in self.samples), default=0)

    @property
    def num_decodes(self) -> int:
        """Return how many leading chunks have one token."""
        return sum(chunk.length == 1 for chunk in self.chunks)

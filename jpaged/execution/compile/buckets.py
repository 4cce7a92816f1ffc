"""Lists the shapes a step is compiled for. Their number is known before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from jpaged.memory.policies import Adapters, ImageFeatures


@dataclass(frozen=True, order=True)
class Bucket:
    """Describes the padded shape of a step.

    Attributes:
        tokens: rows of the ragged batch.
        seqs: sequences.
        decode_only: every sequence has exactly one token; token i belongs to sequence i.
        images: some tokens may stand for images, or read them.
        adapters: some sequences may run with low-rank adapters.
    """

    tokens: int
    seqs: int
    decode_only: bool
    images: bool = False
    adapters: bool = False

    def holds(self, kind: str) -> bool:
        """Tell whether tokens may read what requests hold of a kind; see `jpaged.memory.policies.NoTable`."""
        return {ImageFeatures.kind: self.images, Adapters.kind: self.adapters}.get(kind, True)

    @property
    def name(self) -> str:
        """Return what people call a step in the bucket."""
        kind = ("decode" if self.decode_only else "mixed") + " step"
        kind += " with images" if self.images else ""
        return f"{kind}{' with adapters' if self.adapters else ''}, {self.tokens} tokens"


class Buckets:
    """Lists all buckets of an engine and finds the smallest that holds a step.

    Decode steps double up to 16 and then go by halves: 1, 2, 4, 8, 16, 24, 32, 48, ... max_num_seqs. Mixed steps go in
    eighths of the token budget (at least 64 tokens apart), which bounds padding where a step is long enough for it
    to cost time. The sampler runs for 1, 4, 8, 16, 32, ... max_num_seqs rows.

    Args:
        verifies: whether steps verify drafts, mostly of a few sequences: mixed steps of 16 and 32 tokens have buckets
            too, as what is computed of padding would cost as much as the drafts save.
        images: whether tokens may stand for images, or read them: mixed steps with some have buckets of their own.
        decodes_with_images: whether decode steps too may have tokens that read images.
        adapters: whether sequences may run with adapters: steps with some have buckets of their own.
        only: the bucket all steps run in, and the sampler for max_num_seqs rows only.
        together: buckets of tokens of images that see each other, in addition to `only`.
    """

    decode: tuple[Bucket, ...]
    mixed: tuple[Bucket, ...]
    sample_rows: tuple[int, ...]

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        verifies: bool = False,
        images: bool = False,
        decodes_with_images: bool = False,
        adapters: bool = False,
        only: Bucket | None = None,
        together: tuple[Bucket, ...] = (),
    ) -> None:
        self._images = images and only is None
        self._adapters = adapters and only is None
        self._decodes_with_images = decodes_with_images and self._images
        if only is not None:
            self.decode, self.mixed = (only,), together
            self.sample_rows = (max_num_seqs,)
            return
        powers = [2**i for i in range((max_num_seqs - 1).bit_length())]
        halves = [3 * power // 2 for power in powers if power >= 16 and 3 * power // 2 < max_num_seqs]
        decode_sizes = [*sorted(powers + halves), max_num_seqs]
        stride = max(64, -(-max_num_batched_tokens // 8 // 64) * 64)
        few_tokens = [size for size in (16, 32) if verifies and size < max_num_batched_tokens]
        mixed_sizes = [*few_tokens, *range(stride, max_num_batched_tokens, stride), max_num_batched_tokens]
        self.decode = tuple(Bucket(size, size, True) for size in decode_sizes)
        self.mixed = tuple(Bucket(size, max_num_seqs, False) for size in mixed_sizes)
        self.sample_rows = (*(power for power in powers if power != 2), max_num_seqs)

    @property
    def all(self) -> tuple[Bucket, ...]:
        shown = self.mixed if self._images else ()
        if self._decodes_with_images:
            shown = self.decode + shown
        plain = self.decode + self.mixed + tuple(replace(bucket, images=True) for bucket in shown)
        return plain + tuple(replace(bucket, adapters=True) for bucket in plain) if self._adapters else plain

    @property
    def largest(self) -> tuple[Bucket, ...]:
        """Return the largest mixed bucket in each of its forms, with images or adapters or without: they hold any
        step."""
        of_all = self.mixed[-1]
        return tuple(bucket for bucket in self.all if replace(bucket, images=False, adapters=False) == of_all)

    def holding(self, bucket: Bucket) -> Iterator[Bucket]:
        """Yield the bucket itself and then every larger bucket that could hold its steps, cheapest first."""
        larger = [other for other in self.decode if bucket.decode_only and other.seqs >= bucket.seqs]
        larger += [other for other in self.mixed if other.tokens >= bucket.tokens and other.seqs >= bucket.seqs]
        # Padding costs as much as tokens do: a mixed step of 64 is cheaper than a decode step of 256.
        for other in sorted(larger, key=lambda other: (other.tokens, not other.decode_only)):
            yield replace(other, images=bucket.images, adapters=bucket.adapters)

    def samples_holding(self, rows: int) -> tuple[int, ...]:
        """Return the numbers of rows, at most max_num_seqs, that the sampler is compiled for and that hold `rows`, from
        the fewest on."""
        return tuple(size for size in self.sample_rows if size >= rows)

    def common(self, sizes: Iterable[tuple[int, int]], *, images: bool = False, adapters: bool = False) -> Bucket:
        """Return the smallest bucket for several steps, given as (tokens, sequences); see `smallest`."""
        sizes = list(sizes)
        each = [self.smallest(tokens=tokens, seqs=seqs) for tokens, seqs in sizes]
        if all(bucket.decode_only for bucket in each) and (self._decodes_with_images or not images):
            return replace(max(each), images=images, adapters=adapters)
        tokens = max(tokens for tokens, _ in sizes)
        return replace(
            next(bucket for bucket in self.mixed if bucket.tokens >= tokens), images=images, adapters=adapters
        )

    def smallest(self, *, tokens: int, seqs: int) -> Bucket:
        """Return the smallest bucket for `tokens` tokens of `seqs` sequences.

        Raises:
            ValueError: no bucket is large enough (the scheduler broke its own limits).
        """
        if tokens == seqs:
            for bucket in self.decode:
                if bucket.seqs >= seqs:
                    return bucket
        for bucket in self.mixed:
            if bucket.tokens >= tokens and bucket.seqs >= seqs:
                return bucket
        largest = self.mixed[-1]
        raise ValueError(
            f"a step of {tokens} tokens of {seqs} sequences is above the largest bucket: "
            f"{largest.tokens} tokens of {largest.seqs} sequences"
        )

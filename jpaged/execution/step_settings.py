"""Says what the steps of an engine may be like, which bounds their shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jpaged.execution.caches.pool import PoolSpec
from jpaged.execution.compile.buckets import Buckets
from jpaged.execution.deterministic import BUCKET, image_bucket
from jpaged.execution.encode import decodes_read_images
from jpaged.execution.image_rows import ImageRows


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Bounds the steps of one replica.

    Attributes:
        max_num_seqs, max_num_batched_tokens: most sequences and tokens of a step.
        max_model_len: most tokens of a sequence.
        vocab_size: number of tokens that are drawn from.
        deterministic: whether steps run as `jpaged.execution.deterministic` says.
        verifies: whether steps verify drafts, see `Buckets`.
        images: whether steps may have tokens that stand for images, see `Buckets`.
        together: lengths of launches of an image whose tokens see each other, ascending; () = they do not. They matter
            to deterministic steps.
        image_rows: packs images into rows; None = the encoder takes them one by one.
        adapters: whether sequences may run with low-rank adapters, see `Buckets`.
        scored: whether every draw has a log-probability, even if no request needs it.
        draws: whether tokens are drawn; False for a model that generates nothing.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    deterministic: bool = False
    verifies: bool = False
    images: bool = False
    together: tuple[int, ...] = ()
    image_rows: ImageRows | None = None
    adapters: bool = False
    scored: bool = True
    draws: bool = True

    @property
    def scores_draws(self) -> bool:
        """Tell whether every draw has log-probabilities, see `ModelPrograms`. The sampler of deterministic steps always
        computes them."""
        return self.scored or self.deterministic

    @property
    def alone(self) -> bool:
        """Tell whether a decode reads what no other row of its step writes, see `LayerCall`: a deterministic step's
        launches have several tokens of a sequence."""
        return not self.deterministic

    def buckets(self, spec: PoolSpec) -> Buckets:
        """Return the buckets of steps over a pool."""
        return Buckets(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            verifies=self.verifies,
            images=self.images,
            decodes_with_images=self.images and decodes_read_images(spec),
            adapters=self.adapters,
            only=replace(BUCKET, images=self.images) if self.deterministic else None,
            together=tuple(map(image_bucket, self.together)) if self.images else (),
        )

"""Says what the steps of an engine may be like: from this and the pool follows every shape that is compiled."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jpaged.execution.buckets import Buckets
from jpaged.execution.caches.pool import PoolSpec
from jpaged.execution.deterministic import BUCKET, image_bucket
from jpaged.execution.encode import sees_images_on


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
        together: tokens of an image that see each other; None = they do not.
        adapters: whether sequences may run with low-rank adapters, see `Buckets`.
        scored: whether every output is told how likely it is, asked for or not.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    deterministic: bool = False
    verifies: bool = False
    images: bool = False
    together: int | None = None
    adapters: bool = False
    scored: bool = True

    @property
    def scores_draws(self) -> bool:
        """Tell whether every draw has log-probabilities, see `ModelPrograms`: deterministic steps have no sampler
        that could do without."""
        return self.scored or self.deterministic

    def buckets(self, spec: PoolSpec) -> Buckets:
        """Return the buckets of steps over a pool."""
        return Buckets(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            verifies=self.verifies,
            images=self.images,
            decodes_with_images=self.images and sees_images_on(spec),
            adapters=self.adapters,
            only=replace(BUCKET, images=self.images) if self.deterministic else None,
            together=image_bucket(self.together) if self.images and self.together else None,
        )

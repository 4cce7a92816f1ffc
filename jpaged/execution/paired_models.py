"""Holds the programs of an engine's model beside those of what drafts for it, whose weights come and go together."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from jpaged.execution.batch import StepBatch, without_adapters
from jpaged.execution.buckets import Bucket
from jpaged.execution.caches.pool import PoolSpec
from jpaged.execution.drafts import DraftProgram
from jpaged.execution.model_programs import ModelPrograms
from jpaged.execution.program_store import ProgramStore


class PairedModels:
    """Holds two models over one pool, or one where nothing drafts.

    Args:
        graphdef, params, spec, mesh, store: see `ModelPrograms`.
        draft: what drafts; None = nothing does.
        scored: see `ModelPrograms`.
        told: told every shape that is about to be compiled, and every one that was.

    Attributes:
        model: weights and programs of the model.
        drafter: those of what drafts; None = nothing does.
        drafter_follows: whether it keeps KV of its own, and so computes whatever the model does.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        params: Any,
        spec: PoolSpec,
        mesh: Mesh,
        told: tuple[Callable[[Hashable], None], Callable[[Hashable, float], None]],
        *,
        draft: DraftProgram | None,
        store: ProgramStore | None,
        scored: bool = True,
    ) -> None:
        self.model = ModelPrograms(graphdef, params, spec, mesh, *told, store=store, scored=scored)
        self.drafter: ModelPrograms | None = None
        if draft is not None:
            weights = params if draft.params is None else draft.params
            self.drafter = ModelPrograms(draft.graphdef, weights, spec, mesh, *told, prefix=draft.prefix)
        self.drafter_follows = draft is not None and draft.prefix != ""
        self._drafter_has_weights = draft is not None and draft.params is not None

    def follow(self, pool: jax.Array, batch: StepBatch, last_tokens: jax.Array, bucket: Bucket) -> jax.Array:
        """Let a drafter that follows compute what the model has computed; return the pool, which is donated."""
        assert self.drafter is not None and self.drafter_follows
        plain, like = without_adapters(batch), replace(bucket, adapters=False)
        pool, _, _ = self.drafter.step(pool, plain, last_tokens, like)
        return pool

    def update_params(self, new: Any) -> None:
        """Swap the model's weights, see `ModelPrograms.update_params`; its first layers draft with the new ones too."""
        self.model.update_params(new)
        if self.drafter is not None and not self._drafter_has_weights:
            self.drafter.share_params(self.model)

    def widen_params(self) -> None:
        """Hold the model's weights as arrays from now on, see `ModelPrograms.widen`."""
        self.model.widen()
        if self.drafter is not None and not self._drafter_has_weights:
            self.drafter.share_params(self.model)

    def release_params(self, *, keep: bool) -> None:
        """Let go of the weights, see `ModelPrograms.release_params`; the host keeps those of a draft model."""
        self.model.release_params(keep=keep)
        if self.drafter is not None and self._drafter_has_weights:
            self.drafter.release_params(keep=True)
        elif self.drafter is not None:
            self.drafter.share_params(self.model)

    def restore_params(self) -> bool:
        """Put back the weights that the host keeps, all or none; return whether all are on the devices then."""
        if not self.model.can_have_params:
            return False
        there = self.model.restore_params()
        if self.drafter is not None and self._drafter_has_weights:
            there = self.drafter.restore_params() and there
        elif self.drafter is not None:
            self.drafter.share_params(self.model)
        return there

    def close(self) -> None:
        """Let go of the weights and of all that was compiled."""
        for programs in filter(None, (self.model, self.drafter)):
            programs.close()

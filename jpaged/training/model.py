"""Differentiates a model's modules over whole sequences, and computes the engine's own values where asked to."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jpaged.loading.build_context import build_context
from jpaged.loading.loaded_model import LoadedModel
from jpaged.loading.parameters.targets import abstract_model
from jpaged.model_api import TENSOR_AXIS, CausalLM, TakesImages
from jpaged.training.exact import EngineShapes, check_exact, exact_logprobs
from jpaged.training.scores import token_logprobs
from jpaged.training.sequences import empty_cache, layer_operations, places
from pallas_kernels.held_matrix import is_held


class TrainableModel:
    """A model of `jpaged_models` as training sees it: the same modules and parameters, without a pool.

    The parameters' tree is that of `jpaged.LLM.params`, so what an optimiser makes of it goes back by `update_params`.

    Args:
        model: the model with shapes for arrays, built for products that XLA can differentiate.
        mesh: the devices that an engine's parameters lie on.
        dtype: dtype of activations.
        engine: the engine whose bits `deterministic=True` gives; None = no engine.
        bound_to_mesh: whether the model runs on `mesh` only, as one does whose experts are spread over devices. Others
            run wherever their parameters lie.

    Attributes:
        graphdef: ``nnx.merge(graphdef, params)`` is the model.
    """

    def __init__(
        self,
        model: CausalLM,
        mesh: Mesh,
        dtype: Any,
        engine: EngineShapes | None = None,
        *,
        bound_to_mesh: bool = False,
    ) -> None:
        self.graphdef: nnx.GraphDef = nnx.split(model)[0]
        self.layer_groups = model.layer_groups
        self.vocab_size = model.vocab_size
        self._num_ids = model.prompt_vocab_size if isinstance(model, TakesImages) else model.vocab_size
        self.mesh = mesh
        self.engine = engine
        self.bound_to_mesh = bound_to_mesh
        self._dtype = dtype
        self._names = frozenset(group.name for group in model.layer_groups)
        self._plain = jax.jit(self._differentiable, static_argnames=("start",))
        self._exact = jax.jit(self._to_the_bit(), static_argnames=("start",))

    @classmethod
    def of_config(
        cls,
        family: type[Any],
        config: Any,
        mesh: Mesh,
        dtype: Any,
        *,
        stacked: bool,
        expert_parallel: bool = False,
        column_unit: int | None = None,
        engine: EngineShapes | None = None,
    ) -> TrainableModel:
        """Build the model that an engine's parameters fit.

        Args:
            family, config: the model's class and its Hugging Face config.
            stacked, expert_parallel, column_unit: as the parameters are held, see `BuildContext`. A `column_unit` of
                None is that of the mesh's devices.
        """
        build = build_context(mesh, dtype, stacked=stacked, expert_parallel=expert_parallel, kernel_impl="xla")
        if column_unit is not None:
            build = replace(build, column_unit=column_unit)
        # Layers that are not stacked follow one another: a loop's derivative adds up zeros for each layer it has not
        # chosen.
        model = abstract_model(family, config, replace(build, product_impl="xla", unrolled=not stacked))
        return cls(model, mesh, dtype, engine, bound_to_mesh=expert_parallel and mesh.shape[TENSOR_AXIS] > 1)

    @classmethod
    def of(cls, loaded: LoadedModel) -> TrainableModel:
        """Return the model that `jpaged.loading.load_model` has loaded; its weights are ``loaded.params``."""
        return cls.of_config(
            type(loaded.model),
            loaded.config,
            loaded.mesh,
            loaded.dtype,
            stacked=loaded.stacked,
            expert_parallel=loaded.expert_parallel,
            column_unit=loaded.column_unit,
        )

    def logprobs(
        self,
        params: Any,
        tokens: Int[Array, "batch tokens"],
        mask: Bool[Array, "batch tokens"] | None = None,
        *,
        start: int = 1,
        deterministic: bool = False,
    ) -> Float[Array, "batch scored"]:
        """Return log-probabilities; see `jpaged.training.logprobs`."""
        tokens, real, longest = _checked(tokens, mask, start)
        _check_ids(tokens, real, self._num_ids)
        check_floating(params)
        if deterministic:
            if self.engine is None:
                raise ValueError("deterministic=True needs the engine whose bits are meant: give an LLM, not a model")
            check_exact(self.engine, self._names, longest)
        run = self._exact if deterministic else self._plain
        return run(params, tokens, real, start=start)

    def hidden(
        self, model: CausalLM, tokens: Int[Array, "batch tokens"], real: Bool[Array, "batch tokens"]
    ) -> Float[Array, "rows embed"]:
        """Return every token's hidden state, ``rows = batch * tokens``; to be traced.

        Args:
            model: what ``nnx.merge(graphdef, params)`` gives.
        """
        cache = empty_cache(self.layer_groups, tokens.size, self._dtype)
        operate = layer_operations(self.layer_groups, real)
        with self.under_mesh():
            hidden, _ = model(tokens.reshape(-1), places(real).reshape(-1), cache, operate)
        return hidden

    def under_mesh(self) -> AbstractContextManager[Any]:
        """Return the context that the model is traced in: its mesh where it is bound to that. JAX refuses derivatives
        of arrays on a mesh of another size within one."""
        return jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh) if self.bound_to_mesh else nullcontext()

    def _differentiable(self, params: Any, tokens: Array, real: Array, *, start: int) -> Array:
        model = nnx.merge(self.graphdef, params)
        hidden = self.hidden(model, tokens, real)
        before = hidden.reshape(*tokens.shape, -1)[:, start - 1 : -1]
        with self.under_mesh():
            scored = token_logprobs(model, before.reshape(-1, before.shape[-1]), tokens[:, start:].reshape(-1))
        return jnp.where(_wanted(real, start), scored.reshape(len(tokens), -1), 0.0)

    def _to_the_bit(self) -> Any:
        """Return a function whose values are the engine's and whose derivative is that of `_differentiable`."""

        def run(params: Any, tokens: Array, real: Array, *, start: int) -> Array:
            return values(start, params, tokens, real)

        @partial(jax.custom_vjp, nondiff_argnums=(0,))
        def values(start: int, params: Any, tokens: Array, real: Array) -> Array:
            assert self.engine is not None
            wanted = jnp.pad(_wanted(real, start), ((0, 0), (start, 0)))
            return exact_logprobs(self.engine, self._names, params, tokens, wanted, real)[:, start:]

        def forward(start: int, params: Any, tokens: Array, real: Array) -> tuple[Array, tuple[Any, Array, Array]]:
            return values(start, params, tokens, real), (params, tokens, real)

        def backward(start: int, kept: tuple[Any, Array, Array], gradient: Array) -> tuple[Any, None, None]:
            params, tokens, real = kept
            pull = jax.vjp(lambda given: self._differentiable(given, tokens, real, start=start), params)[1]
            return pull(gradient)[0], None, None

        values.defvjp(forward, backward)
        return run


def check_floating(params: Any) -> None:
    """Check that every parameter has a derivative.

    Raises:
        ValueError: matrices are quantised, or held in bfloat16 for a CPU's products.
    """
    held = jax.tree.leaves(params, is_leaf=is_held)
    if any(map(is_held, held)):
        raise ValueError(
            "params hold matrices that are quantised, or in a CPU's tiles of bfloat16, which have no derivative: load "
            'the model without quantization, and on a CPU with dtype="float32"'
        )


def _checked(tokens: Any, mask: Any, start: int) -> tuple[Array, Array, int]:
    """Return the arguments as arrays, and the most tokens that a sequence may have."""
    tokens = jnp.asarray(tokens)
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer) or tokens.shape[1] < 2:
        raise ValueError(f"tokens is {tokens.dtype}{list(tokens.shape)}, not integers [batch, tokens] with 2 or more")
    shape = tokens.shape if mask is None else np.shape(mask)
    if shape != tokens.shape:
        raise ValueError(f"mask has shape {list(shape)}, tokens {list(tokens.shape)}")
    if isinstance(start, bool) or not isinstance(start, int) or not 1 <= start < tokens.shape[1]:
        raise ValueError(f"start={start!r} is not an integer from 1 to {tokens.shape[1] - 1}, the last token")
    longest = tokens.shape[1] if mask is None or not _is_known(mask) else _longest(np.asarray(mask).astype(bool))
    real = jnp.ones(shape, bool) if mask is None else jnp.asarray(mask).astype(bool)
    return tokens.astype(jnp.int32), real, longest


def _check_ids(tokens: Array, real: Array, number: int) -> None:
    """Check that all tokens but padding have ids below a number, where they can be looked at: of others XLA would make
    NaN, or the value of another token.

    Raises:
        ValueError: one has not; the message names the first.
    """
    if not (_is_known(tokens) and _is_known(real)):
        return
    ids = np.asarray(tokens)
    outside = np.argwhere(np.asarray(real) & ((ids < 0) | (ids >= number)))
    if len(outside):
        row, place = outside[0].tolist()
        raise ValueError(
            f"tokens[{row}, {place}]={ids[row, place]} is outside the vocabulary [0, {number}), and no padding by mask"
        )


def _is_known(array: Any) -> bool:
    """Tell whether an array can be looked at: not while it is traced, or where other hosts have parts of it."""
    return not isinstance(array, jax.core.Tracer) and getattr(array, "is_fully_addressable", True)


def _longest(real: Bool[np.ndarray, "batch tokens"]) -> int:
    """Return how many tokens the longest sequence has.

    Raises:
        ValueError: a sequence has padding between its tokens.
    """
    begins = np.diff(real.astype(np.int8), axis=1, prepend=0) == 1
    holes = np.flatnonzero(begins.sum(axis=1) > 1)
    if len(holes):
        row = int(holes[0])
        again = int(np.flatnonzero(begins[row])[1])
        raise ValueError(
            f"mask[{row}] has padding before token {again}, in the middle of its sequence: tokens of a sequence lie "
            "side by side"
        )
    return int(real.sum(axis=1).max(initial=0))


def _wanted(real: Bool[Array, "batch tokens"], start: int) -> Bool[Array, "batch scored"]:
    """Tell which tokens from `start` on follow a token of their sequence."""
    return real[:, start:] & real[:, start - 1 : -1]

"""Rolls out for Tunix (google-tunix, extra ``tunix``): `JpagedRollout` is a `rollout_engine` of its `RLCluster`.

The actor that Tunix trains is the engine's own model, see `actor_of`, so that weights go from one to the other as they
are, from device to device:

    llm = LLM(folder, dtype="float32", deterministic=True)
    cluster_config = ClusterConfig(rollout_engine=functools.partial(JpagedRollout, llm=llm), ...)
    cluster = RLCluster(actor=actor_of(llm), tokenizer=llm.get_tokenizer(), cluster_config=cluster_config)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int
from tunix.rl.rollout import base_rollout

from jpaged.llm import LLM
from jpaged.loading.nnx_state import state_of
from jpaged.sampling_params import SamplingParams
from jpaged.training import TrainableModel, logprobs

_PART = "model"
"""The attribute under which a `TunixActor` holds the engine's model."""


class TunixActor(nnx.Module):
    """The engine's model as Tunix calls its models: whole sequences in, logits out, no cache.

    Parameters: model, those of the engine.
    """

    def __init__(self, trainable: TrainableModel, params: Any) -> None:
        self.model = nnx.merge(trainable.graphdef, params)
        self.trainable = trainable

    def __call__(
        self,
        input_tokens: Int[Array, "batch tokens"],
        positions: Int[Array, "batch tokens"],
        cache: None,
        attention_mask: Bool[Array, "batch tokens tokens"],
    ) -> tuple[Float[Array, "batch tokens vocab"], None]:
        """Return float32 logits.

        Args:
            positions: not read: they follow from the mask.
            cache: None.
            attention_mask: causal; padding does not see itself.

        Raises:
            ValueError: there is a cache.
        """
        if cache is not None:
            raise ValueError(f"cache is a {type(cache).__name__}, but this model is called over whole sequences only")
        real = jnp.diagonal(attention_mask, axis1=1, axis2=2)
        hidden = self.trainable.hidden(self.model, input_tokens, real)
        with jax.sharding.use_abstract_mesh(self.trainable.mesh.abstract_mesh):
            logits = self.model.logits(hidden)
        return logits.reshape(*input_tokens.shape, -1), None


def actor_of(llm: LLM) -> TunixActor:
    """Return the model that an engine serves, with a copy of its weights, to be trained.

    Raises:
        ValueError: the weights are quantised.
    """
    from jpaged.training.model import check_floating

    check_floating(llm.params)
    own = jax.tree.map(jnp.copy, llm.params)  # a trainer donates its arrays
    return TunixActor(llm.trainable(), own)


class JpagedRollout(base_rollout.BaseRollout):
    """Generates with an engine, for Tunix's learners.

    Args:
        rollout_actor: the actor that is trained, of `actor_of`; the engine takes over its weights.
        tokenizer: Tunix's adapter of the engine's tokenizer.
        mesh: the devices that Tunix means for rollouts; the engine keeps its own.
        rollout_config: how is sampled, unless `generate` is told otherwise.
        llm: the engine, of which nobody else has requests. With ``deterministic=True`` its log-probabilities are those
            that it drew with, to the last bit.

    Raises:
        ValueError: the actor is not of `actor_of`.
    """

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: Mesh | None = None,
        rollout_config: base_rollout.RolloutConfig | None = None,
        *,
        llm: LLM,
    ) -> None:
        if not isinstance(rollout_actor, TunixActor):
            raise ValueError(f"rollout_actor is a {type(rollout_actor).__name__}: make the actor by actor_of(llm)")
        del mesh, rollout_config
        self._llm = llm
        self._tokenizer = tokenizer
        self.update_params(nnx.state(rollout_actor, nnx.Param))

    def generate(
        self, prompts: Sequence[str], rollout_config: base_rollout.RolloutConfig, **kwargs: Any
    ) -> base_rollout.RolloutOutput:
        """Generate one completion for each prompt; those that are given several times differ.

        Prompts are cut to their last ``max_prompt_length`` tokens. `logits` are not kept.

        Raises:
            ValueError: return_logprobs with a temperature other than 1: log-probabilities are the model's own, before
                the temperature; or the engine refuses a parameter.
            TypeError: an argument is unknown.
        """
        if kwargs:
            raise TypeError(f"generate() takes no {', '.join(sorted(kwargs))}")
        config = rollout_config
        if config.return_logprobs and config.temperature != 1.0:
            raise ValueError(
                f"return_logprobs=True with temperature={config.temperature}: log-probabilities are the model's own, "
                "before the temperature; give temperature=1.0"
            )
        width = config.max_prompt_length
        ids = [list(self._tokenizer.encode(prompt))[-width:] for prompt in prompts]
        outputs = self._llm.generate(
            [{"prompt_token_ids": each} for each in ids], _sampling(config, len(ids)), use_tqdm=False
        )
        answers = [output.outputs[0] for output in outputs]
        padded = np.full((len(ids), width), self.pad_id(), np.int32)
        for row, each in zip(padded, ids, strict=True):
            row[width - len(each) :] = each
        return base_rollout.RolloutOutput(
            text=[answer.text for answer in answers],
            logits=None,
            tokens=[np.array(answer.token_ids, np.int32) for answer in answers],
            left_padded_prompt_tokens=padded,
            logprobs=[_drawn(answer) for answer in answers] if config.return_logprobs else None,
        )

    def get_per_token_logps(
        self, prompt_tokens: Int[Array, "batch prompt"], completion_tokens: Int[Array, "batch completion"]
    ) -> Float[Array, "batch completion"]:
        """Return the log-probabilities of completions, 0 for padding, with the engine's weights; its own bits where it
        is deterministic."""
        tokens = jnp.concatenate([jnp.asarray(prompt_tokens), jnp.asarray(completion_tokens)], axis=1)
        found = logprobs(
            self._llm,
            self._llm.params,
            tokens,
            tokens != self.pad_id(),
            start=prompt_tokens.shape[1],
            deterministic=self._llm.config.deterministic,
        )
        return jax.lax.stop_gradient(found)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Give the engine a trainer's weights, a state of the actor; they are copied on the devices.

        Raises:
            ValueError: they are not all of the actor's parameters, as of LoRA alone.
        """
        del filter_types  # of a model without adapters it names all parameters
        if _PART not in params:
            raise ValueError(f"params have no {_PART!r}: they are not the state of an actor of actor_of(llm)")
        described = self._llm.held_weights.described
        shardings = jax.tree.map(lambda leaf: leaf.sharding, described)
        placed = jax.device_put(state_of(params[_PART], described), shardings, may_alias=False)
        with jax.transfer_guard("allow"):  # Tunix forbids what goes by the host; the engine's tables do
            self._llm.update_params(placed)

    def pad_id(self) -> int:
        """Return the token that pads prompts and completions."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """Return the token that ends a completion."""
        return self._tokenizer.eos_id()

    def model(self) -> nnx.Module:
        """Return the model with the engine's weights. They are other arrays than the trainer's, so that Tunix knows to
        bring its own after each step."""
        return TunixActor(self._llm.trainable(), self._llm.params)


def _sampling(config: base_rollout.RolloutConfig, number: int) -> list[SamplingParams]:
    """Return each prompt's parameters; with a seed each has one of its own that follows from it."""
    seeds: list[int | None] = [None] * number
    if config.seed is not None:
        data = config.seed
        if jnp.issubdtype(getattr(data, "dtype", np.int32), jax.dtypes.prng_key):
            data = jax.random.key_data(data)
        words = [int(word) for word in np.atleast_1d(np.asarray(data)).reshape(-1)]
        seeds = [int(seed) for seed in np.random.default_rng(words).integers(0, 2**31, number)]
    ends = config.eos_tokens
    return [
        SamplingParams(
            temperature=config.temperature,
            top_p=1.0 if config.top_p is None else config.top_p,
            top_k=-1 if config.top_k is None else config.top_k,
            max_tokens=config.max_tokens_to_generate,
            seed=seed,
            ignore_eos=ends is not None,
            stop_token_ids=[] if ends is None else list(ends),
            logprobs=0 if config.return_logprobs else None,
        )
        for seed in seeds
    ]


def _drawn(answer: Any) -> np.ndarray:
    """Return the log-probabilities of an answer's tokens."""
    pairs = zip(answer.token_ids, answer.logprobs, strict=True)
    return np.array([each[token].logprob for token, each in pairs], np.float32)

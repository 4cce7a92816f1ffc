"""A rollout engine for Tunix (google-tunix, extra ``tunix``): `JpagedRollout` is a `rollout_engine` of `RLCluster`.

Tunix trains the engine's own model (`actor_of`), so that weights are copied from device to device without conversion:

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

from jpaged.integrations.padding import after_first, before_last, completed
from jpaged.llm import LLM
from jpaged.sampling_params import SamplingParams
from jpaged.training import TrainableModel, logprobs
from jpaged.validation import integer

_PART = "model"
"""Attribute of a `TunixActor` with the engine's model."""


class TunixActor(nnx.Module):
    """The engine's model with Tunix's interface: whole sequences in, logits out, no cache.

    It runs on the devices of its parameters. A model whose experts are spread over devices must stay on the engine's.

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
            positions: unused; they follow from the mask.
            cache: None.
            attention_mask: causal; padding does not see itself. A hidden token within a sequence counts as a token,
                such as a padding token in a prompt, which the engine does not treat as padding either.

        Raises:
            ValueError: a cache is given.
        """
        if cache is not None:
            raise ValueError(f"cache is a {type(cache).__name__}, but this model is called over whole sequences only")
        shown = jnp.diagonal(attention_mask, axis1=1, axis2=2)
        real = after_first(shown) & before_last(shown)
        hidden = self.trainable.hidden(self.model, input_tokens, real)
        with self.trainable.under_mesh():
            logits = self.model.logits(hidden)
        return logits.reshape(*input_tokens.shape, -1), None


def actor_of(llm: LLM) -> TunixActor:
    """Return the engine's model with a copy of its weights, for training.

    Raises:
        ValueError: the weights are quantised.
    """
    from jpaged.training.model import check_floating

    check_floating(llm.params)
    own = jax.tree.map(jnp.copy, llm.params)  # a trainer donates its arrays
    return TunixActor(llm.trainable(), own)


class JpagedRollout(base_rollout.BaseRollout):
    """Generates with an engine, for Tunix's learners.

    Fields of a `RolloutConfig` for Tunix's other engines are ignored: ``kv_cache_size`` and those that begin with
    ``rollout_vllm`` or ``rollout_sglang_jax``.

    Args:
        rollout_actor: the trained actor, from `actor_of`; the engine copies its weights.
        tokenizer: Tunix's adapter of the engine's tokenizer.
        mesh: Tunix's devices for rollouts; unused. Tunix reads the engine's from the attribute `mesh`.
        rollout_config: checked against the engine. Its temperature decides whether `get_per_token_logps` is
            available; `generate` gets the sampling parameters.
        llm: the engine, without other callers. With ``deterministic=True`` its log-probabilities are exactly those of
            the draws.

    Raises:
        ValueError: the actor is not from `actor_of`; its experts are spread over devices other than the engine's; or
            rollout_config disagrees with the engine in dtype, devices or names of weights, or has empty prompts.
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
        del mesh
        self._llm = llm
        self._tokenizer = tokenizer
        self._temperature = 1.0
        self._ends: Sequence[int] = sorted(llm.input_processor.eos_ids)
        if rollout_config is not None:
            check_config(rollout_config, llm)
            self._temperature = rollout_config.temperature
            if rollout_config.eos_tokens is not None:
                self._ends = rollout_config.eos_tokens
        self.update_params(nnx.state(rollout_actor, nnx.Param))

    @property
    def mesh(self) -> Mesh:
        """Return the engine's devices."""
        return self._llm.trainable().mesh

    def generate(
        self, prompts: Sequence[str], rollout_config: base_rollout.RolloutConfig, **kwargs: Any
    ) -> base_rollout.RolloutOutput:
        """Generate one completion for each prompt; repeated prompts get different ones.

        Prompts are cut to their last ``max_prompt_length`` tokens. `logits` is None.

        Raises:
            ValueError: return_logprobs with a temperature other than 1, since log-probabilities are those before the
                temperature; rollout_config disagrees with the engine; or the engine refuses a parameter.
            TypeError: an argument is unknown.
        """
        if kwargs:
            raise TypeError(f"generate() takes no {', '.join(sorted(kwargs))}")
        config = rollout_config
        check_config(config, self._llm)
        if config.return_logprobs and config.temperature != 1.0:
            raise ValueError(
                f"return_logprobs=True with temperature={config.temperature}: log-probabilities are the model's own, "
                "before the temperature; give temperature=1.0"
            )
        width = config.max_prompt_length
        ids = [list(self._tokenizer.encode(prompt))[-width:] for prompt in prompts]
        outputs = self._llm.generate(
            [{"prompt_token_ids": each} for each in ids], sampling_of(config, len(ids)), use_tqdm=False
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
        self,
        prompt_tokens: Int[Array, "batch prompt"],
        completion_tokens: Int[Array, "batch completion"],
        completion_mask: Bool[Array, "batch completion"] | None = None,
    ) -> Float[Array, "batch completion"]:
        """Return the log-probabilities of completions with the engine's weights, 0 for padding.

        They equal the engine's own to the last bit if it is deterministic.

        Args:
            prompt_tokens: padded on the left. A prompt that begins with the padding token loses it.
            completion_tokens: padded on the right.
            completion_mask: mask of the completions' tokens, the first ones of each row. None: see
                `padding.completed`.

        Raises:
            ValueError: rollout_config has a temperature other than 1 or 0 (greedy), since Tunix's GRPO compares these
                values with its own after the temperature; or the mask has another shape than completion_tokens, or
                gaps.
        """
        if self._temperature not in (0.0, 1.0):
            raise ValueError(
                f"get_per_token_logps() with temperature={self._temperature}: log-probabilities are the model's own, "
                "before the temperature; give temperature=1.0"
            )
        prompts, completions = jnp.asarray(prompt_tokens), jnp.asarray(completion_tokens)
        if completion_mask is None:
            own = completed(completions, self.pad_id(), self._ends)
        else:
            own = jnp.asarray(completion_mask).astype(bool)
        if own.shape != completions.shape:
            raise ValueError(
                f"completion_mask has shape {list(own.shape)}, completion_tokens {list(completions.shape)}"
            )
        found = logprobs(
            self._llm,
            self._llm.params,
            jnp.concatenate([prompts, completions], axis=1),
            jnp.concatenate([after_first(prompts != self.pad_id()), own], axis=1),
            start=prompts.shape[1],
            deterministic=self._llm.config.deterministic,
        )
        return jax.lax.stop_gradient(found)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Copy a trainer's weights, a state of the actor on any mesh, to the engine's devices.

        Raises:
            ValueError: parameters of the actor are missing, as in a state of LoRA alone; or the model's experts are
                spread over devices other than the engine's.
        """
        del filter_types  # selects all parameters of a model without adapters
        if _PART not in params:
            raise ValueError(f"params have no {_PART!r}: they are not the state of an actor of actor_of(llm)")
        _check_devices(params, self._llm.trainable())
        self._llm.update_params(params[_PART], copy=True)

    def pad_id(self) -> int:
        """Return the padding token."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """Return the token that ends a completion."""
        return self._tokenizer.eos_id()

    def model(self) -> nnx.Module:
        """Return the model with the engine's weights, apart from the trainer's: Tunix updates them each step."""
        return TunixActor(self._llm.trainable(), self._llm.params)


def _check_devices(params: Any, trainable: TrainableModel) -> None:
    """Check that weights are on the engine's devices, if its model can run on no others.

    Raises:
        ValueError: they are not.
    """
    there, own = jax.tree.leaves(params)[0].sharding.device_set, set(trainable.mesh.devices.flat)
    if trainable.bound_to_mesh and there != own:
        raise ValueError(
            f"the actor lies on {len(there)} devices that are not the engine's {len(own)}: with "
            "enable_expert_parallel=True it must stay on the engine's mesh"
        )


def _drawn(answer: Any) -> np.ndarray:
    """Return the log-probabilities of an answer's tokens."""
    pairs = zip(answer.token_ids, answer.logprobs, strict=True)
    return np.array([each[token].logprob for token, each in pairs], np.float32)


def check_config(config: base_rollout.RolloutConfig, llm: LLM) -> None:
    """Check that an engine agrees with Tunix's configuration, and that prompts may have tokens.

    Raises:
        ValueError: a field disagrees; the message has its name, its value and the engine's value or the limit.
    """
    integer("max_prompt_length", config.max_prompt_length, low=1)
    engine = llm.config
    if config.data_type is not None and jnp.dtype(config.data_type) != jnp.dtype(llm.dtype):
        raise ValueError(f"data_type={jnp.dtype(config.data_type)}, but the engine's is {jnp.dtype(llm.dtype)}")
    sizes = {
        "tensor_parallel_size": (-1, engine.tensor_parallel_size),
        "data_parallel_size": (-1, engine.data_parallel_size),
        "expert_parallel_size": (1, engine.tensor_parallel_size if engine.enable_expert_parallel else 1),
    }
    for name, (default, own) in sizes.items():
        wanted = getattr(config, name)
        if wanted not in (default, own):
            raise ValueError(f"{name}={wanted}, but the engine's is {own}: give it to LLM(...)")
    if config.rollout_mapping_config is not None:
        raise ValueError("rollout_mapping_config must be None: the actor has the engine's own names of weights")


def sampling_of(config: base_rollout.RolloutConfig, number: int) -> list[SamplingParams]:
    """Return each prompt's parameters. A seed in the configuration gives each prompt its own seed."""
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

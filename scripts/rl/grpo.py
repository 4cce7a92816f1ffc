"""Takes steps of GRPO (arXiv 2402.03300) with an engine that rolls out and `jpaged.training` that differentiates.

Plain optax: the policy's weights are those of the engine, which gets the new ones after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jpaged import LLM, SamplingParams
from jpaged.training import logprobs


class Rollout(NamedTuple):
    """Completions of a batch of prompts, several of each, one after another.

    Attributes:
        texts: the completions.
        tokens: prompts, padded on the left, then completions, padded on the right.
        mask: which of them are a sequence's.
        start: the first token of completions.
        drawn: log-probability with which the engine drew each of their tokens; 0 for padding.
    """

    texts: list[str]
    tokens: np.ndarray
    mask: np.ndarray
    start: int
    drawn: np.ndarray


class Report(NamedTuple):
    """What a step was like.

    Attributes:
        reward: mean over all completions.
        divergence: mean over tokens of what the engine's log-probability differs from the trainer's, before the step:
            0 where the trainer's are the engine's to the bit.
        ratio_off: largest difference of an importance ratio from 1 before the step.
        loss: of the step.
    """

    reward: float
    divergence: float
    ratio_off: float
    loss: float


@dataclass(frozen=True)
class Settings:
    """How is trained.

    Attributes:
        samples: completions of each prompt, which are compared with one another.
        prompt_tokens, answer_tokens: width of prompts and completions; longer prompts are refused.
        rate: learning rate.
        clip: importance ratios count up to this far from 1.
    """

    samples: int = 8
    prompt_tokens: int = 20
    answer_tokens: int = 4
    rate: float = 2e-5
    clip: float = 0.2


class Trainer:
    """Trains the weights of an engine, which serves the new ones after every step.

    Args:
        llm: with ``deterministic=True`` the ratios of a step are exactly 1 before it.
    """

    def __init__(self, llm: LLM, settings: Settings) -> None:
        self.llm = llm
        self.settings = settings
        self._optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(settings.rate, b1=0.8))
        self._state = self._optimiser.init(llm.params)
        self._step = jax.jit(self._updated, static_argnames=("start",), donate_argnames=("state",))

    def roll_out(self, prompts: Sequence[str], seed: int) -> Rollout:
        """Draw completions of each prompt; the prompt is computed, and lies in the pool, once.

        Raises:
            ValueError: a prompt is too long.
        """
        settings = self.settings
        params = [
            SamplingParams(
                n=settings.samples,
                temperature=1.0,
                max_tokens=settings.answer_tokens,
                seed=seed * len(prompts) + number,
                logprobs=0,
                stop=["\n"],
            )
            for number in range(len(prompts))
        ]
        outputs = self.llm.generate(list(prompts), params, use_tqdm=False)
        start, width = settings.prompt_tokens, settings.prompt_tokens + settings.answer_tokens
        rows = len(prompts) * settings.samples
        tokens, mask = np.zeros((rows, width), np.int32), np.zeros((rows, width), bool)
        drawn, texts = np.zeros((rows, settings.answer_tokens), np.float32), []
        for number, output in enumerate(outputs):
            given = output.prompt_token_ids
            if len(given) > start:
                raise ValueError(f"prompt {number} has {len(given)} tokens, above prompt_tokens={start}")
            for answer in output.outputs:
                row, ids = len(texts), list(answer.token_ids)
                tokens[row, start - len(given) : start + len(ids)] = [*given, *ids]
                mask[row, start - len(given) : start + len(ids)] = True
                ranked = answer.logprobs or ()
                drawn[row, : len(ids)] = [each[token].logprob for token, each in zip(ids, ranked, strict=True)]
                texts.append(answer.text)
        return Rollout(texts, tokens, mask, start, drawn)

    def step(self, rollout: Rollout, rewards: Sequence[float]) -> Report:
        """Improve the weights by one step on completions and what they are worth, and give them to the engine."""
        worth = np.asarray(rewards, np.float32).reshape(-1, self.settings.samples)
        spread = worth.std(axis=1, keepdims=True)
        advantages = ((worth - worth.mean(axis=1, keepdims=True)) / (spread + 1e-4)).reshape(-1)
        params, self._state, loss, now = self._step(
            self.llm.params, self._state, rollout.tokens, rollout.mask, rollout.drawn, advantages, start=rollout.start
        )
        self.llm.update_params(params)
        counted = rollout.mask[:, rollout.start :]
        differences = np.where(counted, np.asarray(now) - rollout.drawn, 0.0)
        return Report(
            float(worth.mean()),
            float(np.abs(differences).sum() / counted.sum()),
            float(np.abs(np.exp(differences) - 1).max()),
            float(loss),
        )

    def _updated(self, params: Any, state: Any, tokens, mask, drawn, advantages, *, start: int) -> tuple[Any, ...]:
        """Return new weights and optimiser's state, the loss, and the log-probabilities before."""
        counted = mask[:, start:]

        def loss_of(params: Any) -> tuple[jax.Array, jax.Array]:
            deterministic = self.llm.config.deterministic
            now = logprobs(self.llm, params, tokens, mask, start=start, deterministic=deterministic)
            ratio = jnp.exp(now - drawn)
            clipped = jnp.clip(ratio, 1 - self.settings.clip, 1 + self.settings.clip)
            gain = jnp.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
            return -(gain * counted).sum() / counted.sum(), now

        (loss, now), gradient = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, state = self._optimiser.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss, now


def train(
    trainer: Trainer,
    batches: Sequence[Sequence[Any]],
    reward: Callable[[str, Any], float],
    tell: Callable[[int, Report], None] = lambda number, report: None,
    seed: int = 0,
) -> list[Report]:
    """Take a step for each batch of problems and return what the steps were like.

    Args:
        batches: problems, each with a `prompt`.
        reward: what a completion of a problem is worth.
        tell: called with the number and the report of each step.
        seed: another one draws other completions at every step.
    """
    reports = []
    for number, batch in enumerate(batches):
        rollout = trainer.roll_out([problem.prompt for problem in batch], seed=seed * len(batches) + number)
        samples = trainer.settings.samples
        worth = [reward(text, batch[row // samples]) for row, text in enumerate(rollout.texts)]
        reports.append(trainer.step(rollout, worth))
        tell(number, reports[-1])
    return reports

"""Generates for the prompts of a Ray Data dataset: each worker owns an engine and processes batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jpaged.validation import integer

if TYPE_CHECKING:
    from ray.data import Dataset


class Generator:
    """A callable for `Dataset.map_batches`, built once in each worker.

    Args:
        model: the model, as `LLM` takes it.
        engine: further arguments of `LLM`.
        params: arguments of `SamplingParams` for every prompt.
        prompt: column of the prompts, texts or lists of tokens.
        seed: column of the prompts' seeds; None: the seed of `params`.
    """

    def __init__(
        self,
        model: str,
        engine: Mapping[str, Any] | None = None,
        params: Mapping[str, Any] | None = None,
        prompt: str = "prompt",
        seed: str | None = None,
    ) -> None:
        from jpaged import LLM, SamplingParams

        self._params = SamplingParams(**(params or {}))
        self._prompt = prompt
        self._seed = seed
        self._llm = LLM(model, **(engine or {}))

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch with the columns `text`, `token_ids` and `finish_reason` of each prompt's first output.

        Raises:
            ValueError: a column is missing, or a prompt is invalid.
        """
        import numpy as np

        for column in filter(None, (self._prompt, self._seed)):
            if column not in batch:
                raise ValueError(f"the dataset has no column {column!r}; it has {sorted(batch)}")
        asked = [
            one if isinstance(one, str) else {"prompt_token_ids": [int(token) for token in one]}
            for one in batch[self._prompt]
        ]
        params = self._params
        seeds = [] if self._seed is None else [replace(params, seed=int(seed)) for seed in batch[self._seed]]
        outputs = [output.outputs[0] for output in self._llm.generate(asked, seeds or params, use_tqdm=False)]
        tokens = np.empty(len(outputs), object)  # rows of different lengths become plain lists
        tokens[:] = [[*output.token_ids] for output in outputs]
        return {
            **batch,
            "text": np.asarray([output.text for output in outputs], object),
            "token_ids": tokens,
            "finish_reason": np.asarray([output.finish_reason for output in outputs], object),
        }


def generate(
    dataset: Dataset,
    model: str,
    *,
    engine: Mapping[str, Any] | None = None,
    params: Mapping[str, Any] | None = None,
    prompt: str = "prompt",
    seed: str | None = None,
    workers: int = 1,
    batch_size: int = 256,
    **resources: Any,
) -> Dataset:
    """Return the dataset with the model's output for each prompt, computed when the dataset is read.

    Args:
        model, engine, params, prompt, seed: see `Generator`.
        workers: number of engines, each in its own process.
        batch_size: prompts given to an engine at once. Make it several times the engine's `max_num_seqs`, since fewer
            requests run at the end of each batch.
        resources: resources of each worker, as `map_batches` takes them: `num_cpus`, `num_gpus`, `resources`.

    Raises:
        ValueError: a number is not positive.
    """
    workers = integer("workers", workers, low=1)
    batch_size = integer("batch_size", batch_size, low=1)
    from ray.data import ActorPoolStrategy

    return dataset.map_batches(
        Generator,
        fn_constructor_kwargs={"model": model, "engine": engine, "params": params, "prompt": prompt, "seed": seed},
        compute=ActorPoolStrategy(size=workers),
        batch_size=batch_size,
        **resources,
    )

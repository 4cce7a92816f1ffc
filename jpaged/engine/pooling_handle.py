"""What `jpaged.LLM` does beside generating: vectors, classes and scores of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jpaged.engine import offline
from jpaged.engine.pooled_prompts import PooledPrompt, aborted, pool_prompts
from jpaged.engine.sleep_handle import SleepHandle
from jpaged.pooling_outputs import ClassificationOutput, EmbeddingOutput, PoolingRequestOutput, ScoringOutput
from jpaged.pooling_params import Pooling, PoolingParams
from jpaged.sampling_params import SamplingParams
from jpaged.text.adapters import LoRA, one_lora_each
from jpaged.text.batch import one_each, several
from jpaged.text.prompt import Prompt, Tokenization, pair_prompts


class PoolingHandle(SleepHandle):
    """Holds an engine whose hidden states can be asked for."""

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRA | Sequence[LoRA | None] | None = None,
        *,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """Return a vector for each prompt, made of the hidden states after the model's final norm.

        Args:
            prompts, use_tqdm, lora_request, tokenization_kwargs: as `LLM.generate`.
            pooling_params: one for all, or one each; None = as the model's folder says.

        Raises:
            ValueError: a prompt is empty, too long or could never fit the pool; `dimensions` is above the model's; the
                model's folder asks for a pooling or a module that is not known here; or there are replicas.
        """
        if self._pooling.modules:
            raise ValueError(
                f"{self.config.model} makes its vectors by {', '.join(self._pooling.modules)} (modules.json), which is "
                "not read; known are Transformer, Pooling and Normalize"
            )
        batch = several(prompts)
        each = one_each(PoolingParams() if pooling_params is None else pooling_params, len(batch), PoolingParams)
        width = self._width
        for i, params in enumerate(each):
            if params.dimensions is not None and params.dimensions > width:
                raise ValueError(f"prompt {i}: dimensions={params.dimensions} is above the model's {width}")
        poolings = [params.pooling or self._default_pooling() for params in each]
        found = self._pool(batch, poolings, use_tqdm, tokenization_kwargs, lora_request)
        return [
            _output(one, EmbeddingOutput(self._finished(one.vector, params).tolist()))
            for one, params in zip(found, each, strict=True)
        ]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        lora_request: LoRA | Sequence[LoRA | None] | None = None,
        *,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Return the probabilities of a model's classes for each prompt, which it reads off the last token.

        Args:
            prompts, use_tqdm, lora_request, tokenization_kwargs: as `LLM.generate`.

        Raises:
            ValueError: the model has no head for classes (``score.weight``); or as `embed`.
        """
        head = self._pooling.classes
        if head is None:
            others = "embed(), generate() and score()" if self._pooling.generates else "embed() and score() of pairs"
            raise ValueError(f"{self.config.model} has no head for classes (score.weight): only {others}")
        batch = several(prompts)
        found = self._pool(batch, ["last"] * len(batch), use_tqdm, tokenization_kwargs, lora_request)
        return [_output(one, self._classes(head @ one.vector)) for one in found]

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt] | None = None,
        /,
        use_tqdm: bool = True,
        lora_request: LoRA | Sequence[LoRA | None] | None = None,
        *,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Return how likely each prompt is or, of two, how alike they are.

        Args:
            data_1: prompts. Alone, a prompt's score is the log-probability of all its tokens after the first.
            data_2: prompts to compare with those of `data_1`, as many, or any number for one; the score is the cosine
                of their vectors, as `embed` gives them. A model with a head for one class (a cross-encoder) reads both
                texts as one prompt, joined as its tokenizer joins them, and the score is that class's probability.
            use_tqdm, lora_request, tokenization_kwargs: as `LLM.generate`.

        Raises:
            ValueError: the numbers of prompts differ; the model has no vocabulary's head, which a prompt alone needs;
                it has several classes, or one and a prompt of a pair is no text; or as `embed`.
        """
        if data_2 is None:
            return self._likelihoods(several(data_1), use_tqdm, tokenization_kwargs, lora_request)
        first, second = list(several(data_1)), list(several(data_2))
        if len(first) == 1:
            first *= len(second)
        if len(first) != len(second):
            raise ValueError(f"data_1 has {len(first)} prompts, data_2 {len(second)}: as many, or one, are compared")
        if isinstance(lora_request, Sequence) and not isinstance(lora_request, str):
            raise ValueError("lora_request of two lists of prompts must be one adapter for all")
        if self._pooling.classes is not None:
            return self._pairs(first, second, use_tqdm, tokenization_kwargs, lora_request)
        params = PoolingParams(normalize=True)
        both = self.embed([*first, *second], use_tqdm, params, lora_request, tokenization_kwargs=tokenization_kwargs)
        return [
            PoolingRequestOutput(
                b.request_id,
                ScoringOutput(float(np.dot(a.outputs.embedding, b.outputs.embedding))),
                a.prompt_token_ids + b.prompt_token_ids,
                a.num_cached_tokens + b.num_cached_tokens,
            )
            for a, b in zip(both[: len(first)], both[len(first) :], strict=True)
        ]

    # ------------------------------------------------------------------ parts

    @property
    def _width(self) -> int:
        return int(self.model_config.get_text_config().hidden_size)

    def _default_pooling(self) -> Pooling:
        if self._pooling.unknown is not None:
            raise ValueError(
                f"{self.config.model} asks for pooling {self._pooling.unknown}; known are last and mean, which "
                "PoolingParams(pooling=) chooses"
            )
        return self._pooling.pooling

    def _pool(
        self,
        batch: Sequence[Prompt],
        poolings: Sequence[Pooling],
        use_tqdm: bool,
        tokenization_kwargs: Mapping[str, Any] | None,
        lora_request: LoRA | Sequence[LoRA | None] | None,
    ) -> list[PooledPrompt]:
        tokenization, loras = Tokenization.of(tokenization_kwargs), one_lora_each(lora_request, len(batch))
        return pool_prompts(self._engine, self.input_processor, batch, poolings, use_tqdm, tokenization, loras)

    def _finished(self, vector: np.ndarray, params: PoolingParams) -> np.ndarray:
        vector = vector[: params.dimensions]
        normalize = self._pooling.normalize if params.normalize is None else params.normalize
        return vector / max(float(np.linalg.norm(vector)), 1e-12) if normalize else vector

    def _classes(self, logits: np.ndarray) -> ClassificationOutput:
        if self._pooling.independent:
            probs = 1 / (1 + np.exp(-logits))
        else:
            weights = np.exp(logits - logits.max())
            probs = weights / weights.sum()
        return ClassificationOutput(probs.tolist(), logits.tolist())

    def _pairs(
        self,
        first: Sequence[Prompt],
        second: Sequence[Prompt],
        use_tqdm: bool,
        tokenization_kwargs: Mapping[str, Any] | None,
        lora_request: LoRA | Sequence[LoRA | None] | None,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Score pairs by a head of one class."""
        head, model = self._pooling.classes, self.config.model
        assert head is not None
        if len(head) != 1:
            raise ValueError(f"{model} has {len(head)} classes: score() of pairs needs a model with one, or with none")
        if self._pooling.activation not in (None, "Sigmoid"):
            raise ValueError(f"{model} asks for scores after {self._pooling.activation}; known is Sigmoid")
        tokenization = Tokenization.of(tokenization_kwargs)
        batch = pair_prompts(first, second, self.input_processor.tokenizer, tokenization)
        found = self._pool(batch, ["last"] * len(batch), use_tqdm, tokenization_kwargs, lora_request)
        return [_output(one, ScoringOutput(self._classes(head @ one.vector).probs[0])) for one in found]

    def _likelihoods(
        self,
        batch: Sequence[Prompt],
        use_tqdm: bool,
        tokenization_kwargs: Mapping[str, Any] | None,
        lora_request: LoRA | Sequence[LoRA | None] | None,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        params = [SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)] * len(batch)
        parts, tokenization = (self.input_processor, self.output_processor), Tokenization.of(tokenization_kwargs)
        outputs = offline.answer(
            self._engine,
            *parts,
            batch,
            params,
            [None] * len(batch),
            use_tqdm,
            "raise",
            tokenization,
            one_lora_each(lora_request, len(batch)),
            prefill_only=True,
        )
        found = []
        for i, output in enumerate(outputs):
            if output.outputs[0].finish_reason == "abort":
                raise aborted(i)
            ids, scored = output.prompt_token_ids, output.prompt_logprobs or [None]
            total = sum(ranked[token].logprob for token, ranked in zip(ids[1:], scored[1:], strict=True) if ranked)
            found.append(PoolingRequestOutput(output.request_id, ScoringOutput(float(total)), ids))
        return found


def _output(one: PooledPrompt, outputs: Any) -> PoolingRequestOutput[Any]:
    request = one.request
    return PoolingRequestOutput(
        request.request_id, outputs, request.prompt_token_ids, num_cached_tokens=request.num_cached_tokens
    )

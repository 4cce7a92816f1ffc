"""Computes vectors, classes and scores of prompts: makes their requests and, once these have run, reads the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np

from jpaged.engine.generate import Batch, generate, run_to_end
from jpaged.model_api import PromptEncoder
from jpaged.outputs import ClassificationOutput, EmbeddingOutput, PoolingRequestOutput, ScoringOutput
from jpaged.pooling_params import POOLINGS, Pooling, PoolingParams
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling import Request
from jpaged.text.adapters import LoRA
from jpaged.text.batch import one_each, one_lora_each, several
from jpaged.text.input_processor import PREFILL_ONLY
from jpaged.text.pairs import judged_prompts, pair_prompts
from jpaged.text.prompt import Prompt, Tokenization, cut_text, parse_prompt, with_text_before
from jpaged.validation import boolean

if TYPE_CHECKING:
    from jpaged.engine.builder import ServedModel
    from jpaged.engine.owner import OwnedEngine


T = TypeVar("T")
U = TypeVar("U")


class PooledPrompt(NamedTuple):
    """A finished request and its prompt's vector in float32.

    Attributes:
        vocab_size: ids of prompts from it on are of tokens of another type, see `PromptEncoder`; None = there are no
            types.
    """

    request: Request
    vector: np.ndarray
    vocab_size: int | None

    def output(self, outputs: Any) -> PoolingRequestOutput[Any]:
        """Return the prompt's public output."""
        request, size = self.request, self.vocab_size
        ids = request.prompt_token_ids if size is None else [token % size for token in request.prompt_token_ids]
        cached, by_tier = request.num_cached_tokens, request.tier_tokens
        return PoolingRequestOutput(
            request.request_id, outputs, ids, num_cached_tokens=cached, num_cached_by_tier=by_tier
        )


@dataclass(frozen=True)
class Pooled(Generic[T]):
    """Requests that are to be run to their ends, and what reads their results then.

    Attributes:
        requests: one for each prompt, not yet begun.
        results: reads them; it raises RuntimeError if a request was aborted, for example by
            ``update_params(running="abort")`` in a signal's handler.
    """

    requests: list[Request]
    results: Callable[[], T]

    def then(self, make: Callable[[T], U]) -> Pooled[U]:
        """Return the same requests with results made of these."""
        return Pooled(self.requests, lambda: make(self.results()))


def run_pooled(owner: OwnedEngine, work: Pooled[T], use_tqdm: bool) -> T:
    """Run requests in the caller's thread, which steps the engine, and return the results; wait for the engine's lock.

    Args:
        use_tqdm: whether a bar shows how far they are.
    """
    engine = owner.engine
    with engine.lock:
        engine.check_available()
        try:
            for i, request in enumerate(work.requests):
                try:
                    engine.add(request)
                except ValueError as error:
                    raise ValueError(f"prompt {i}: {error}") from error
            run_to_end(engine, work.requests, use_tqdm)
        finally:
            engine.abort(*work.requests)
    return work.results()


class RunOptions(NamedTuple):
    """Arguments that `embed`, `classify` and `score` share, as `LLM.generate` takes them."""

    use_tqdm: bool
    tokenization_kwargs: Mapping[str, Any] | None
    lora_request: LoRA | Sequence[LoRA | None] | None


class Pooler:
    """Prepares the results of `LLM.embed`, `LLM.classify` and `LLM.score`; those methods document the arguments.

    Any thread may call it; it tokenises the prompts.
    """

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self._name = served.config.model
        self._head = served.pooling

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None,
        options: RunOptions,
    ) -> Pooled[list[PoolingRequestOutput[EmbeddingOutput]]]:
        """Prepare a vector for each prompt."""
        return self._embed(several(prompts), pooling_params, options)

    def _embed(
        self,
        batch: Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None,
        options: RunOptions,
        names: Sequence[str] = (),
    ) -> Pooled[list[PoolingRequestOutput[EmbeddingOutput]]]:
        """Prepare a vector for each prompt of a list; `names` as in `_prepare`."""
        if self._head.answers is not None:
            raise ValueError(f"{self._name} scores pairs by the tokens of its answer: only generate() and score()")
        if self._head.modules:
            raise ValueError(
                f"{self._name} makes its vectors by {', '.join(self._head.modules)} (modules.json), which is "
                "not read; known are Transformer, Pooling, Dense and Normalize"
            )
        each = one_each(PoolingParams() if pooling_params is None else pooling_params, len(batch), PoolingParams)
        width = int(self._served.model_config.get_text_config().hidden_size)
        if self._head.dense is not None:
            width = len(self._head.dense)
        texts = []
        for i, (prompt, params) in enumerate(zip(batch, each, strict=True)):
            if params.dimensions is not None and params.dimensions > width:
                raise ValueError(f"prompt {i}: dimensions={params.dimensions} is above the model's {width}")
            texts.append(with_text_before(prompt, self._text_before(i, params)))
        poolings = [params.pooling or self._default_pooling() for params in each]
        return self._prepare(texts, poolings, options, names).then(
            lambda found: [
                one.output(EmbeddingOutput(self._shaped(one.vector, params).tolist()))
                for one, params in zip(found, each, strict=True)
            ]
        )

    def classify(
        self, prompts: Prompt | Sequence[Prompt], options: RunOptions
    ) -> Pooled[list[PoolingRequestOutput[ClassificationOutput]]]:
        """Prepare the probabilities of the model's classes for each prompt."""
        head = self._head.classes
        if head is None:
            others = "embed(), generate() and score()" if self._head.generates else "embed() and score() of pairs"
            raise ValueError(f"{self._name} has no head for classes (score.weight): only {others}")
        batch = several(prompts)
        return self._prepare(batch, [self._head.class_pooling] * len(batch), options).then(
            lambda found: [one.output(self._classes(head(one.vector))) for one in found]
        )

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        options: RunOptions,
    ) -> Pooled[list[PoolingRequestOutput[ScoringOutput]]]:
        """Prepare the similarity of pairs of prompts."""
        first, second = list(several(data_1)), list(several(data_2))
        names = _names("data_1", len(first)), _names("data_2", len(second))
        if len(first) == 1:
            first, names = first * len(second), (names[0] * len(second), names[1])
        if len(first) != len(second):
            raise ValueError(f"data_1 has {len(first)} prompts, data_2 {len(second)}: as many, or one, are compared")
        if isinstance(options.lora_request, Sequence) and not isinstance(options.lora_request, str):
            raise ValueError("lora_request of two lists of prompts must be one adapter for all")
        if self._head.classes is not None:
            return self._cross_encode(first, second, options, names)
        return self._embed([*first, *second], PoolingParams(normalize=True), options, [*names[0], *names[1]]).then(
            lambda both: [
                PoolingRequestOutput(
                    b.request_id,
                    ScoringOutput(float(np.dot(a.outputs.embedding, b.outputs.embedding))),
                    a.prompt_token_ids + b.prompt_token_ids,
                    a.num_cached_tokens + b.num_cached_tokens,
                    num_cached_by_tier=Counter(a.num_cached_by_tier) + Counter(b.num_cached_by_tier),
                )
                for a, b in zip(both[: len(first)], both[len(first) :], strict=True)
            ]
        )

    def _cross_encode(
        self,
        first: Sequence[Prompt],
        second: Sequence[Prompt],
        options: RunOptions,
        names: tuple[Sequence[str], Sequence[str]],
    ) -> Pooled[list[PoolingRequestOutput[ScoringOutput]]]:
        """Prepare scores of pairs by a head of one class; both texts of a pair are joined into one prompt.

        Args:
            names: how errors name the first and the second texts; of a pair they name the longer one.
        """
        head = self._head.classes
        assert head is not None
        if len(head) != 1:
            raise ValueError(
                f"{self._name} has {len(head)} classes: score() of pairs needs a model with one, or with none"
            )
        if self._head.activation not in (None, "Sigmoid", "Identity"):
            raise ValueError(
                f"{self._name} asks for scores after {self._head.activation}; known are Sigmoid and Identity"
            )
        longer = [names[_size(two) >= _size(one)][i] for i, (one, two) in enumerate(zip(first, second, strict=True))]
        batch = self._pairs(first, second, Tokenization.of(options.tokenization_kwargs), longer)
        work = self._prepare(batch, [self._head.class_pooling] * len(batch), options, longer)
        if self._head.activation == "Identity":
            return work.then(lambda found: [one.output(ScoringOutput(float(head(one.vector)[0]))) for one in found])
        return work.then(
            lambda found: [one.output(ScoringOutput(self._classes(head(one.vector)).probs[0])) for one in found]
        )

    def _pairs(
        self, first: Sequence[Prompt], second: Sequence[Prompt], tokenization: Tokenization, names: Sequence[str]
    ) -> list[Prompt]:
        """Return one prompt for each pair; errors have a pair's name of `names`."""
        model, tokenizer, inputs = self._served.model, self._served.tokenizer, self._served.input_processor
        answers = self._head.answers
        if answers is not None:
            return judged_prompts(
                first,
                second,
                tokenizer,
                tokenization,
                instruction=self._head.prompts.get(self._head.default_prompt or ""),
                add_generation_prompt=answers.add_generation_prompt,
                variables=answers.variables,
                most=inputs.max_model_len if self._most_tokens is None else self._most_tokens,
                names=names,
            )
        return pair_prompts(
            first,
            second,
            tokenizer,
            tokenization,
            vocab_size=model.vocab_size,
            token_types=model.token_types if isinstance(model, PromptEncoder) else 1,
            most=self._most_tokens,
            bound=inputs.bound(None, tokenization),
            names=names,
        )

    def likelihoods(
        self, owner: OwnedEngine, data: Prompt | Sequence[Prompt], options: RunOptions
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Return the log-probability of each prompt's tokens after the first; the caller's thread steps the engine."""
        if isinstance(self._served.model, PromptEncoder):
            raise ValueError(f"{self._name} has no vocabulary's head: score() needs pairs of prompts, not one")
        prompts = several(data)
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        batch = Batch(
            prompts,
            [params] * len(prompts),
            tokenization=Tokenization.of(options.tokenization_kwargs),
            loras=one_lora_each(options.lora_request, len(prompts)),
            prefill_only=True,
        )
        processors = self._served.input_processor, self._served.output_processor
        found = []
        for i, output in enumerate(generate(owner.engine, *processors, batch, options.use_tqdm)):
            if output.outputs[0].finish_reason == "abort":
                raise _aborted(i)
            ids, scored = output.prompt_token_ids, output.prompt_logprobs or [None]
            total = sum(ranked[token].logprob for token, ranked in zip(ids[1:], scored[1:], strict=True) if ranked)
            found.append(PoolingRequestOutput(output.request_id, ScoringOutput(float(total)), ids))
        return found

    def _prepare(
        self, batch: Sequence[Prompt], poolings: Sequence[Pooling], options: RunOptions, names: Sequence[str] = ()
    ) -> Pooled[list[PooledPrompt]]:
        """Tokenise a batch and prepare one vector for each prompt, pooled from the hidden states after the final norm.

        Args:
            names: how errors name the prompts; () = by their numbers.

        Raises:
            ValueError: a prompt is empty, too long, or could never fit the pool.
        """
        tokenization = Tokenization.of(options.tokenization_kwargs)
        loras = one_lora_each(options.lora_request, len(batch))
        boolean("use_tqdm", options.use_tqdm)
        inputs = self._served.input_processor
        requests = []
        for i, (prompt, pooling, lora) in enumerate(zip(batch, poolings, loras, strict=True)):
            try:
                if self._most_tokens is not None:
                    prompt = cut_text(prompt, inputs.tokenizer, self._most_tokens, tokenization)
                bound = inputs.bound(None, tokenization)
                parsed = parse_prompt(prompt, inputs.tokenizer, tokenization, inputs.images, bound=bound)
                request = inputs.request(parsed, PREFILL_ONLY, lora=lora, prefill_only=True)
            except ValueError as error:
                raise ValueError(f"{names[i] if names else f'prompt {i}'}: {error}") from error
            request.pooling = pooling
            requests.append(request)
        model = self._served.model
        vocab_size = model.vocab_size if isinstance(model, PromptEncoder) else None

        def results() -> list[PooledPrompt]:
            for i, request in enumerate(requests):
                if request.sequences[0].finish_reason == "abort":
                    raise _aborted(i)
            return [PooledPrompt(request, _vector(request), vocab_size) for request in requests]

        return Pooled(requests, results)

    @property
    def _most_tokens(self) -> int | None:
        """Return where a text is cut; None if it is refused when it is too long."""
        most = self._head.most_tokens
        return None if most is None else min(most, self._served.input_processor.max_model_len)

    def _text_before(self, number: int, params: PoolingParams) -> str:
        """Return what is put before the text of a prompt.

        Raises:
            ValueError: the model has no prompt of this name, or one whose tokens do not count in the mean.
        """
        head = self._head
        name = head.default_prompt if params.prompt_name is None else params.prompt_name
        if name is None:
            return ""
        if name not in head.prompts:
            known = ", ".join(map(repr, head.prompts)) or "none"
            raise ValueError(f"prompt {number}: prompt_name={name!r} is none of the model's prompts: {known}")
        if head.prompts[name] and not head.in_mean and (params.pooling or head.pooling) != "last":
            raise ValueError(
                f"prompt {number}: the tokens of prompt_name={name!r} do not count in {self._name}'s mean "
                "(include_prompt=false in its Pooling module), which is not supported"
            )
        return head.prompts[name]

    def _default_pooling(self) -> Pooling:
        if self._head.unknown is not None:
            raise ValueError(
                f"{self._name} asks for pooling {self._head.unknown}; known are {', '.join(POOLINGS)}, of which "
                "PoolingParams(pooling=) chooses one"
            )
        return self._head.pooling

    def _shaped(self, vector: np.ndarray, params: PoolingParams) -> np.ndarray:
        if self._head.dense is not None:
            vector = self._head.dense(vector)
        vector = vector[: params.dimensions]
        normalize = self._head.normalize if params.normalize is None else params.normalize
        return vector / max(float(np.linalg.norm(vector)), 1e-12) if normalize else vector

    def _classes(self, logits: np.ndarray) -> ClassificationOutput:
        if self._head.independent:
            probs = 1 / (1 + np.exp(-logits))
        else:
            weights = np.exp(logits - logits.max())
            probs = weights / weights.sum()
        return ClassificationOutput(probs.tolist(), logits.tolist())


def _names(data: str, prompts: int) -> list[str]:
    """Return how errors name the prompts of one side of `score`."""
    return [data] if prompts == 1 else [f"{data}[{i}]" for i in range(prompts)]


def _size(prompt: Prompt) -> int:
    """Return the length of a prompt's text; 0 if it has none."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return len(text) if isinstance(text, str) else 0


def _aborted(prompt: int) -> RuntimeError:
    return RuntimeError(f"prompt {prompt} was aborted before all of it was computed")


def _vector(request: Request) -> np.ndarray:
    """Return the vector of the first or last token, or that of all tokens from those of the prompt's chunks."""
    length = len(request.prompt_token_ids)
    if request.pooling == "last":
        return next(vector for end, vector in request.pooled.values() if end == length)
    if request.pooling == "cls":
        return request.pooled[0][1]
    end, parts = 0, []
    while end < length:
        end, part = request.pooled[end]
        parts.append(part)
    if request.pooling == "max":
        return np.max(parts, axis=0)
    number = np.sqrt(length) if request.pooling == "mean_sqrt_len" else length
    return np.asarray(np.sum(parts, axis=0, dtype=np.float64) / number, np.float32)

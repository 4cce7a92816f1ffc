"""What requests for vectors, classes and scores give back; the names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar


@dataclass(frozen=True)
class EmbeddingOutput:
    """One vector of a prompt.

    Attributes:
        embedding: its numbers.
    """

    embedding: list[float] = field(repr=False)

    @property
    def hidden_size(self) -> int:
        """Return how many numbers it has."""
        return len(self.embedding)


@dataclass(frozen=True)
class ClassificationOutput:
    """What a model for classification makes of a prompt.

    Attributes:
        probs: the probability of each class: among all, or of each on its own where the model is for several labels or
            has one class.
        logits: what the probabilities are made of.
    """

    probs: list[float]
    logits: list[float]

    @property
    def num_classes(self) -> int:
        """Return how many classes there are."""
        return len(self.probs)


@dataclass(frozen=True)
class ScoringOutput:
    """How likely a prompt is, or how alike two are.

    Attributes:
        score: a log-probability, a cosine or a probability, see `jpaged.LLM.score`.
    """

    score: float


T = TypeVar("T", EmbeddingOutput, ClassificationOutput, ScoringOutput)


@dataclass(frozen=True)
class PoolingRequestOutput(Generic[T]):
    """A prompt and what was made of it.

    Attributes:
        request_id: the engine's number for the request; of a pair of two requests, that for its second prompt.
        outputs: what was made of it.
        prompt_token_ids: tokens of the prompt; of a pair, of both.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache.
        finished: True.
    """

    request_id: int | str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True

"""The bodies of `/v1/embeddings`, `/classify`, `/v1/score` and `/v1/rerank`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from jpaged.server.bodies import Body, FieldClasses
from jpaged.server.errors import ApiError
from jpaged.server.openai.bodies.field_classes import VECTORS
from jpaged.server.openai.bodies.prompts import Prompts, each_prompt, few_prompts

Texts = Annotated[list[str], BeforeValidator(few_prompts)]


class EmbeddingRequest(Body):
    """A request for the vectors of one or several prompts, given as text or tokens (OpenAI's).

    Attributes:
        encoding_format: "base64" gives the bytes of little-endian float32 numbers.
        dimensions: number of leading numbers that are kept.
        prompt_name: which of the model's prompts stands before a text, see `jpaged.PoolingParams`.
    """

    classes: ClassVar[FieldClasses] = VECTORS

    model: str | None = None
    input: Annotated[Prompts, BeforeValidator(few_prompts)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    prompt_name: str | None = None
    user: str | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Return the prompts as a list, also a single one."""
        return each_prompt(self.input)


class ClassifyRequest(Body):
    """A request for the probabilities of a model's classes for one or several prompts (vLLM's)."""

    classes: ClassVar[FieldClasses] = VECTORS

    model: str | None = None
    input: Annotated[Prompts, BeforeValidator(few_prompts)]
    user: str | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Return the prompts as a list, also a single one."""
        return each_prompt(self.input)


class ScoreRequest(Body):
    """A request for the scores of pairs of texts (vLLM's): one text and several, or as many of both."""

    classes: ClassVar[FieldClasses] = VECTORS

    model: str | None = None
    text_1: str | Texts
    text_2: str | Texts
    user: str | None = None

    @property
    def sides(self) -> tuple[list[str], list[str]]:
        """Return both sides as lists.

        Raises:
            ApiError: they are of different lengths, and the first has not one text.
        """
        first, second = ([side] if isinstance(side, str) else side for side in (self.text_1, self.text_2))
        if len(first) not in (1, len(second)):
            message = f"text_1 has {len(first)} texts and text_2 {len(second)}: as many, or one, are compared"
            raise ApiError(message, param="text_1", code="invalid_value")
        return first, second


class Document(Body):
    """A document as an object (Jina's)."""

    text: str


class RerankRequest(Body):
    """A request for the documents that fit a query best, the best first (Jina's and Cohere's).

    Attributes:
        documents: texts, or objects that hold one.
        top_n: how many documents to return; None = all.
        return_documents: whether the texts come back too.
    """

    classes: ClassVar[FieldClasses] = VECTORS

    model: str | None = None
    query: str
    documents: Annotated[list[str | Document], BeforeValidator(few_prompts)]
    top_n: int | None = Field(None, ge=1)
    return_documents: bool = True
    user: str | None = None

    @property
    def texts(self) -> list[str]:
        """Return the documents' texts."""
        return [one if isinstance(one, str) else one.text for one in self.documents]

"""`/v1/embeddings`, `/classify`, `/v1/score` and `/v1/rerank`."""

from __future__ import annotations

import base64
import time
from collections.abc import Collection, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request

from jpaged import PoolingParams
from jpaged.outputs import PoolingRequestOutput
from jpaged.server.cache_use import details, split
from jpaged.server.caller import Caller
from jpaged.server.errors import ApiError, refused
from jpaged.server.openai.bodies.vectors import ClassifyRequest, EmbeddingRequest, RerankRequest, ScoreRequest
from jpaged.server.openapi import GENERATES
from jpaged.server.serving import Serving, serving_of
from jpaged.server.streaming import while_connected

router = APIRouter()
_Body = EmbeddingRequest | ClassifyRequest | ScoreRequest | RerankRequest
_SENT_AS = {"prompt": "input", "prompt_token_ids": "input"}


@router.post("/v1/embeddings", responses=GENERATES)
async def embed(body: EmbeddingRequest, request: Request) -> dict[str, Any]:
    """Return a vector for each prompt."""
    serving = serving_of(request)
    caller, given = _prompts(serving, request, body)
    try:
        params = PoolingParams(dimensions=body.dimensions, prompt_name=body.prompt_name)
    except ValueError as error:
        raise refused(error, EmbeddingRequest.model_fields) from error
    adapter, place = serving.adapter_of(body.model), serving.queue.places(caller.key)
    work = serving.engine.embed(given, params, lora_request=adapter, place=place)
    outputs = await _answered(request, caller, work, EmbeddingRequest.model_fields, _SENT_AS)
    data = [
        {"object": "embedding", "index": i, "embedding": _encoded(output.outputs.embedding, body.encoding_format)}
        for i, output in enumerate(outputs)
    ]
    return {"object": "list", "data": data, "model": body.model or serving.settings.model, "usage": _usage(outputs)}


@router.post("/classify", responses=GENERATES)
async def classify(body: ClassifyRequest, request: Request) -> dict[str, Any]:
    """Return the probabilities of the model's classes for each prompt, with the name of the likeliest."""
    serving = serving_of(request)
    caller, given = _prompts(serving, request, body)
    adapter, place = serving.adapter_of(body.model), serving.queue.places(caller.key)
    work = serving.engine.classify(given, lora_request=adapter, place=place)
    outputs = await _answered(request, caller, work, ClassifyRequest.model_fields, _SENT_AS)
    names = {
        int(number): name for number, name in (getattr(serving.engine.model_config, "id2label", None) or {}).items()
    }
    data = []
    for i, output in enumerate(outputs):
        probs = output.outputs.probs
        likeliest = max(range(len(probs)), key=probs.__getitem__)
        data.append({"index": i, "label": names.get(likeliest), "probs": probs, "num_classes": len(probs)})
    return {
        "id": f"classify-{caller.answer_id}",
        "object": "list",
        "created": int(time.time()),
        "model": body.model or serving.settings.model,
        "data": data,
        "usage": _usage(outputs),
    }


@router.post("/v1/score", responses=GENERATES)
@router.post("/score", include_in_schema=False)
async def score(body: ScoreRequest, request: Request) -> dict[str, Any]:
    """Return a score for each pair of texts."""
    serving, (first, second) = serving_of(request), body.sides
    caller = _begin(serving, request, body, "text_2", max(len(first), len(second)))
    outputs = await _scores(serving, request, caller, body, first, second, {"data_1": "text_1", "data_2": "text_2"})
    return {
        "id": f"score-{caller.answer_id}",
        "object": "list",
        "created": int(time.time()),
        "model": body.model or serving.settings.model,
        "data": [{"index": i, "object": "score", "score": one.outputs.score} for i, one in enumerate(outputs)],
        "usage": _usage(outputs),
    }


@router.post("/v1/rerank", responses=GENERATES)
@router.post("/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
async def rerank(body: RerankRequest, request: Request) -> dict[str, Any]:
    """Return the documents that fit a query best, the best first."""
    serving, texts = serving_of(request), body.texts
    caller = _begin(serving, request, body, "documents", len(texts))
    names = {"data_1": "query", "data_2": "documents"}
    outputs = await _scores(serving, request, caller, body, [body.query], texts, names)
    order = sorted(range(len(texts)), key=lambda i: (-outputs[i].outputs.score, i))
    results = [
        {
            "index": i,
            "relevance_score": outputs[i].outputs.score,
            **({"document": {"text": texts[i]}} if body.return_documents else {}),
        }
        for i in order[: body.top_n]
    ]
    return {
        "id": f"rerank-{caller.answer_id}",
        "model": body.model or serving.settings.model,
        "results": results,
        "usage": _usage(outputs),
    }


def _prompts(
    serving: Serving, request: Request, body: EmbeddingRequest | ClassifyRequest
) -> tuple[Caller, list[dict[str, Any]]]:
    """Return the caller and its prompts, as the engine takes them."""
    caller = _begin(serving, request, body, "input", len(body.prompts))
    salt = _salt(caller)
    return caller, [{"prompt" if isinstance(one, str) else "prompt_token_ids": one, **salt} for one in body.prompts]


def _begin(serving: Serving, request: Request, body: _Body, field: str, prompts: int) -> Caller:
    """Return the caller of a request for so many prompts.

    Raises:
        ApiError: the server is draining, does not know the model, or takes fewer prompts.
    """
    caller = serving.begin(request)
    serving.check_model(body.model)
    caller.log |= {"user": body.user} if body.user else {}
    most = serving.settings.max_waiting
    if not 1 <= prompts <= most:
        raise ApiError(
            f"{field} has {prompts} prompts; the server takes 1 to {most} (--max-waiting-requests)",
            param=field,
            code="invalid_value",
        )
    serving.queue.check_prompts(caller.key, prompts)
    return caller


async def _scores(
    serving: Serving,
    request: Request,
    caller: Caller,
    body: ScoreRequest | RerankRequest,
    first: Sequence[str],
    second: Sequence[str],
    sent_as: Mapping[str, str],
) -> list[PoolingRequestOutput[Any]]:
    salt = _salt(caller)
    sides = [[{"prompt": text, **salt} for text in side] for side in (first, second)]
    adapter, place = serving.adapter_of(body.model), serving.queue.places(caller.key)
    work = serving.engine.score(*sides, lora_request=adapter, place=place)
    return await _answered(request, caller, work, type(body).model_fields, sent_as)


async def _answered(
    request: Request,
    caller: Caller,
    work: Coroutine[Any, Any, list[PoolingRequestOutput[Any]]],
    fields: Collection[str],
    sent_as: Mapping[str, str] | None = None,
) -> list[PoolingRequestOutput[Any]]:
    """Wait for the results, while the client does.

    Args:
        fields, sent_as: see `errors.refused`.

    Raises:
        ApiError: the engine refuses a prompt, or cannot do this with its model.
    """
    try:
        outputs = await while_connected(request, caller, work)
    except ValueError as error:
        raise refused(error, fields, sent_as) from error
    caller.num_prompt_tokens += sum(len(output.prompt_token_ids) for output in outputs)
    caller.log["prompt_tokens"] = caller.num_prompt_tokens
    return outputs


def _salt(caller: Caller) -> dict[str, str]:
    salt = caller.salted(None)
    return {} if salt is None else {"cache_salt": salt}


def _encoded(vector: Sequence[float], form: str) -> list[float] | str:
    if form == "float":
        return list(vector)
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode("ascii")


def _usage(outputs: Sequence[PoolingRequestOutput[Any]]) -> dict[str, Any]:
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt,
        "prompt_tokens_details": details(cached, map(split, outputs)),
    }

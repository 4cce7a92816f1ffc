"""`/tokenize`, `/detokenize` and, if the server is to show it, `/tokenizer_info`."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from jpaged import AsyncLLM
from jpaged.server.errors import ApiError, refused
from jpaged.server.openai.bodies.chat import SENT_AS_MESSAGES, media_paths
from jpaged.server.openai.bodies.prompts import DetokenizeRequest, TokenizeRequest
from jpaged.server.openapi import errors
from jpaged.server.serving import MOST_TOKENS, Serving, serving_of

router, info_router = APIRouter(), APIRouter()


@router.post("/tokenize", responses=errors(404))
async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
    """Return the tokens of a text or a conversation."""
    serving = serving_of(request)
    serving.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError("/tokenize takes either prompt or messages", param="prompt", code="invalid_value")
    chat_only = {
        "tools",
        "chat_template_kwargs",
        "mm_processor_kwargs",
        "add_generation_prompt",
        "continue_final_message",
    }
    if body.prompt is not None and (given := sorted(chat_only & body.model_fields_set)):
        raise ApiError(f"{given[0]} needs messages", param=given[0], code="invalid_value")
    tokenizer = _tokenizer(serving)
    engine, most = serving.engine, max(MOST_TOKENS, 8 * serving.engine.max_model_len)
    ids: list[int]
    if body.messages is not None:
        messages = [message.as_template_takes_it(f"messages.{i}") for i, message in enumerate(body.messages)]
        serving.check_parts(messages)
        options: dict[str, Any] = {
            "add_generation_prompt": body.add_generation_prompt and not body.continue_final_message,
            "continue_final_message": body.continue_final_message,
            "chat_template_kwargs": body.chat_template_kwargs,
            "mm_processor_kwargs": body.mm_processor_kwargs,
            "tools": None if body.tools is None else [tool.in_turn().shown() for tool in body.tools],
        }
        options["add_special_tokens"] = bool(body.add_special_tokens)
        try:
            made = await asyncio.to_thread(engine.chat_prompt, messages, max_tokens=most, **options)
        except ValueError as error:
            paths = media_paths(body.messages), media_paths(body.messages, "video_url")
            raise refused(error, TokenizeRequest.model_fields, SENT_AS_MESSAGES, *paths) from error
        ids = made["prompt_token_ids"]
    else:
        special = body.add_special_tokens is not False
        ids = await asyncio.to_thread(_encode, engine, body.prompt, special, most)
    found: dict[str, Any] = {"count": len(ids), "max_model_len": serving.engine.max_model_len, "tokens": ids}
    found["token_strs"] = tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
    return found


@router.post("/detokenize", responses=errors(404))
async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, Any]:
    """Return the text of tokens."""
    serving = serving_of(request)
    serving.check_model(body.model)
    size = serving.engine.vocab_size
    for token in body.tokens:
        if not 0 <= token < size:
            raise ApiError(
                f"tokens has {token}, which is not in the vocabulary of {size}", param="tokens", code="invalid_value"
            )
    tokenizer = _tokenizer(serving)
    return {"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens)}


@info_router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> dict[str, Any]:
    """Return the tokenizer's special tokens and its chat template, but none of its paths.

    A client that cannot load the tokenizer, as lm_eval's, renders conversations with them.
    """
    tokenizer = _tokenizer(serving_of(request))
    template = tokenizer.chat_template
    return {
        "tokenizer_class": getattr(tokenizer, "class_name", type(tokenizer).__name__),
        "vocab_size": len(tokenizer),
        "model_max_length": serving_of(request).engine.max_model_len,
        **{name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")},
        "chat_template": template.get("default") if isinstance(template, dict) else template,
    }


def _tokenizer(serving: Serving) -> Any:
    if serving.engine.tokenizer is None:
        raise refused(ValueError("the model has no tokenizer; the option --tokenizer takes another model's"))
    return serving.engine.tokenizer


def _encode(engine: AsyncLLM, text: str | None, special: bool, most: int) -> list[int]:
    try:
        return engine.tokenize(text or "", add_special_tokens=special, max_tokens=most)
    except (UnicodeEncodeError, TypeError) as error:  # a lone surrogate
        raise ApiError(f"prompt={text!r} is not Unicode text", param="prompt", code="invalid_value") from error
    except ValueError as error:
        raise ApiError(str(error), param="prompt", code="invalid_value") from error

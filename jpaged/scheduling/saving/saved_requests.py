"""Requests and their sequences as plain data, and back.

Nothing may be in flight: every token that a sequence has is one that the host has seen. Times are kept as ages, so that
they go on as if the time between two processes had not been.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Several
from typing import Any

import numpy as np

from jpaged.scheduling.beam import BeamSearch, Hypothesis
from jpaged.scheduling.request import Request, Sequence, Status
from jpaged.scheduling.saving.saved_images import Arrays, Pictures, image_data, load_image
from jpaged.scheduling.saving.saved_params import beam_params_data, load_beam_params, load_params, params_data
from jpaged.scheduling.top_tokens import TokenRanking

REQUEST_FIELDS = (
    "request_id",
    "name",
    "prompt_token_ids",
    "seed",
    "max_total_tokens",
    "prompt",
    "priority",
    "cache_salt",
    "encoder_tokens",
    "kept_tokens",
    "packed",
    "alone",
    "arrival_number",
    "num_cached_tokens",
    "num_preemptions",
    "num_swaps",
)
"""Fields of a request that are plain as they are."""

TIMES = ("arrival_time", "first_scheduled_time", "first_token_time", "finished_time")

SEQUENCE_FIELDS = (
    "seq_id",
    "index",
    "num_prompt",
    "num_computed",
    "slot",
    "needs_host",
    "fork_at",
    "cumulative_logprob",
    "finish_reason",
    "stop_reason",
    "score",
)
"""Fields of a sequence that are plain as they are."""


def request_data(request: Request, now: float, pictures: Pictures | None = None) -> dict[str, Any]:
    """Return a request with those for its later outputs. One that is finished has no images any more, unless it is of a
    pinned prefix, which may have to be computed again.

    Args:
        now: the time on the clock of the request's times.
        pictures: told of the images; may be left out where there are none.
    """
    mask, beam = request.allowed_mask, request.beam
    pictures = Pictures() if pictures is None else pictures
    needs_images = request.status is not Status.FINISHED or request.kept_tokens > 0
    return {
        **{name: getattr(request, name) for name in REQUEST_FIELDS},
        **{name: _age(getattr(request, name), now) for name in TIMES},
        "pause_ages": [now - then for then in request.pause_times],
        "adapter": None if request.adapter is None else list(request.adapter.salt),
        "params": params_data(request.params),
        "stop_ids": sorted(request.stop_ids),
        "eos_ids": sorted(request.eos_ids),
        "bad_words": [list(word) for word in request.bad_words],
        "allowed_mask": None if mask is None else mask.astype("<i4").tobytes(),
        "prompt_logprobs": {
            position: [logprob, list(ranking)] for position, (logprob, ranking) in request.prompt_logprobs.items()
        },
        "beam": None if beam is None else _beam_data(beam),
        "status": request.status.value,
        "sequences": [_sequence_data(request, seq) for seq in request.sequences],
        "images": [image_data(image, pictures) for image in request.images if needs_images],
        "later": [request_data(part, now, pictures) for part in request.later],
    }


def load_request(data: Mapping[str, Any], now: float, pictures: Several[Arrays] = ()) -> Request:
    """Return a request with those for its later outputs; what looks at its tokens is to be attached.

    Args:
        now: the time on the clock of the request's times.
        pictures: what encoders take of the images, by their numbers.

    Raises:
        ValueError: a parameter of it cannot be given here.
    """
    mask, stop_ids, eos_ids = data["allowed_mask"], frozenset(data["stop_ids"]), frozenset(data["eos_ids"])
    request = Request(
        **{name: data[name] for name in REQUEST_FIELDS},
        **{name: _time(data[name], now) for name in TIMES},
        pause_times=[now - age for age in data["pause_ages"]],
        saved_adapter=None if data.get("adapter") is None else (data["adapter"][0], data["adapter"][1]),
        params=load_params(data["params"]),
        stop_ids=stop_ids,
        eos_ids=eos_ids,
        bad_words=tuple(tuple(word) for word in data["bad_words"]),
        allowed_mask=None if mask is None else np.frombuffer(mask, "<i4").astype(np.int32),
        prompt_logprobs={
            position: (logprob, TokenRanking(*ranking))
            for position, (logprob, ranking) in data["prompt_logprobs"].items()
        },
        beam=None if data["beam"] is None else _load_beam(data["beam"]),
        status=Status(data["status"]),
        sequences=[_load_sequence(data["prompt_token_ids"], one) for one in data["sequences"]],
        images=tuple(load_image(image, pictures) for image in data["images"]),
        later=[load_request(part, now, pictures) for part in data["later"]],
    )
    for seq, one in zip(request.sequences, data["sequences"], strict=True):
        seq.parent = None if one["parent"] is None else request.sequences[one["parent"]]
    return request


def _sequence_data(request: Request, seq: Sequence) -> dict[str, Any]:
    # Of one that ended a token may be pending for ever: nobody waited for the step that drew it.
    assert seq.num_pending == 0 or seq.finished, "a sequence is saved when all its tokens have reached the host"
    return {
        **{name: getattr(seq, name) for name in SEQUENCE_FIELDS},
        "output_token_ids": seq.output_token_ids,
        "candidates": None if seq.candidates is None else list(seq.candidates),
        "logprobs": [[logprob, list(ranking)] for logprob, ranking in seq.logprobs],
        "parent": None if seq.parent is None else request.sequences.index(seq.parent),
    }


def _load_sequence(prompt: list[int], data: Mapping[str, Any]) -> Sequence:
    return Sequence(
        **{name: data[name] for name in SEQUENCE_FIELDS},
        token_ids=prompt + data["output_token_ids"],
        candidates=None if data["candidates"] is None else TokenRanking(*data["candidates"]),
        logprobs=[(logprob, TokenRanking(*ranking)) for logprob, ranking in data["logprobs"]],
    )


def _beam_data(beam: BeamSearch) -> dict[str, Any]:
    return {
        "params": beam_params_data(beam.params),
        "max_tokens": beam.max_tokens,
        "eos_ids": sorted(beam.eos_ids),
        "logprobs": list(beam.logprobs),
        "finished": [list(hypothesis) for hypothesis in beam.finished],
    }


def _load_beam(data: Mapping[str, Any]) -> BeamSearch:
    beam = BeamSearch(load_beam_params(data["params"]), data["max_tokens"], frozenset(data["eos_ids"]))
    beam.logprobs = list(data["logprobs"])
    beam.finished = [Hypothesis(*hypothesis) for hypothesis in data["finished"]]
    return beam


def _age(time: float | None, now: float) -> float | None:
    return None if time is None else now - time


def _time(age: float | None, now: float) -> Any:
    return None if age is None else now - age

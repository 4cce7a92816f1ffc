"""Requests and a scheduler's queues as plain data (numbers, texts, bytes, lists and mappings), and back.

Nothing may be in flight: the host has seen every token that a sequence has. Times are kept as ages, so that they go on
as if no time had passed between two processes. Grammars and searches for stop strings are not saved: they are made
again from the tokens. What requests ask for besides text is written by its kind, see `jpaged.scheduling.held`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from jpaged.cache_retention import read_retention
from jpaged.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from jpaged.scheduling.beam import BeamSearch, Hypothesis
from jpaged.scheduling.held import KINDS, SavedArrays
from jpaged.scheduling.held.base import Arrays
from jpaged.scheduling.request import Request, Sequence, Status
from jpaged.scheduling.scheduler import Scheduler
from jpaged.scheduling.top_tokens import TokenRanking
from jpaged.structured_outputs import StructuredOutputsParams


def plain_array(array: np.ndarray) -> dict[str, Any]:
    """Return an array as plain data, copied."""
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return {"dtype": little.dtype.str, "shape": list(array.shape), "bytes": little.tobytes()}


def load_array(data: Mapping[str, Any]) -> np.ndarray:
    """Return an array whose memory is the data's.

    Raises:
        ValueError: bytes and shape do not fit, or the elements are no numbers.
    """
    dtype = np.dtype(data["dtype"])
    if dtype.kind not in "fiub":
        raise ValueError(f"dtype={data['dtype']!r} of a saved array is none of numbers")
    return np.frombuffer(data["bytes"], dtype).reshape(data["shape"])


def params_data(params: SamplingParams) -> dict[str, Any]:
    """Return every parameter by its name."""
    data = {field.name: getattr(params, field.name) for field in fields(params)}
    shape = params.structured_outputs
    if shape is not None:
        given = {field.name: getattr(shape, field.name) for field in fields(shape)}
        # A schema may hold values that only JSON can express, such as integers of any length.
        data["structured_outputs"] = {**given, "json": None if shape.json is None else json.dumps(shape.json)}
    return {**data, "output_kind": params.output_kind.name}


def load_params(data: Mapping[str, Any]) -> SamplingParams:
    """Return parameters, which are checked as those that a user gives.

    Raises:
        ValueError, TypeError: they are not ones that can be given.
    """
    shape = data["structured_outputs"]
    return SamplingParams(
        **{
            **data,
            "structured_outputs": None if shape is None else StructuredOutputsParams(**shape),
            "output_kind": RequestOutputKind[data["output_kind"]],
        }
    )


def beam_params_data(params: BeamSearchParams) -> dict[str, Any]:
    """Return every parameter by its name."""
    return asdict(params)


def load_beam_params(data: Mapping[str, Any]) -> BeamSearchParams:
    """Return parameters, which are checked as those that a user gives."""
    return BeamSearchParams(**data)


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
"""Fields of a request that are plain as they are, by the names that saved states have for them."""

RENAMED = {"packed": "compact_placement", "alone": "runs_exclusively", "slot": "row"}
"""Attributes of requests and sequences whose saved name is another: that of version 0.2.0, whose states are to be
loaded."""

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
"""Fields of a sequence that are plain as they are, by the names that saved states have for them."""


def request_data(request: Request, now: float, arrays: SavedArrays | None = None) -> dict[str, Any]:
    """Return a request with its overflow requests.

    Args:
        now: the time on the clock of the request's times.
        arrays: collects those of what it asks for; may be left out where there are none.
    """
    mask, beam = request.allowed_mask, request.beam
    arrays = SavedArrays() if arrays is None else arrays
    return {
        **{name: getattr(request, RENAMED.get(name, name)) for name in REQUEST_FIELDS},
        **{name: _age(getattr(request, name), now) for name in TIMES},
        "pause_ages": [now - then for then in request.pause_times],
        **{held.saved_name: held.data(request, arrays) for held in KINDS.values()},
        "retention": None if request.retention is None else [[list(one) for one in each] for each in request.retention],
        "prefix_ends": list(request.prefix_ends),
        "tier_tokens": dict(request.tier_tokens),
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
        "later": [request_data(part, now, arrays) for part in request.overflow_requests],
    }


def load_request(data: Mapping[str, Any], now: float, arrays: Seq[Arrays] = ()) -> Request:
    """Return a request with its overflow requests. Its grammar and stop search are not attached yet.

    Args:
        now: the time on the clock of the request's times.
        arrays: those of `SavedArrays.data`.

    Raises:
        ValueError: a parameter of it cannot be given here.
    """
    mask, stop_ids, eos_ids = data["allowed_mask"], frozenset(data["stop_ids"]), frozenset(data["eos_ids"])
    found = {kind: held.load(data.get(held.saved_name), arrays) for kind, held in KINDS.items()}
    asks = {kind: asked for kind, asked in found.items() if asked is not None}
    plain = {RENAMED.get(name, name): data[name] for name in REQUEST_FIELDS}
    if asks:
        plain["encoder_tokens"] = 0  # 0.2.0 counted what it asks for here
    request = Request(
        **plain,
        asks=asks,
        retention=read_retention(*(data.get("retention") or (None, None))),  # 0.2.0 saved none
        **{name: _time(data[name], now) for name in TIMES},
        pause_times=[now - age for age in data["pause_ages"]],
        params=load_params(data["params"]),
        prefix_ends=tuple(data.get("prefix_ends", ())),  # saved by 0.2.0 without them
        tier_tokens=data.get("tier_tokens", {}),
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
        overflow_requests=[load_request(part, now, arrays) for part in data["later"]],
    )
    for seq, one in zip(request.sequences, data["sequences"], strict=True):
        seq.parent = None if one["parent"] is None else request.sequences[one["parent"]]
    return request


def _sequence_data(request: Request, seq: Sequence) -> dict[str, Any]:
    # An ended sequence may have a pending token for ever: the step that drew it was not read back.
    assert seq.num_pending == 0 or seq.finished, "a sequence is saved when all its tokens have reached the host"
    return {
        **{name: getattr(seq, RENAMED.get(name, name)) for name in SEQUENCE_FIELDS},
        "output_token_ids": seq.output_token_ids,
        "candidates": None if seq.candidates is None else list(seq.candidates),
        "logprobs": [[logprob, list(ranking)] for logprob, ranking in seq.logprobs],
        "parent": None if seq.parent is None else request.sequences.index(seq.parent),
    }


def _load_sequence(prompt: list[int], data: Mapping[str, Any]) -> Sequence:
    return Sequence(
        **{RENAMED.get(name, name): data[name] for name in SEQUENCE_FIELDS},
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


def scheduler_data(scheduler: Scheduler) -> dict[str, Any]:
    """Return the order of the requests and of the free rows, and the counts; the requests are saved separately, but for
    those of vectors, which are not."""
    speculation = scheduler.speculation
    return {
        "requests": [request.request_id for request in scheduler.requests if request.pooling is None],
        "max_num_seqs": scheduler.max_num_seqs,
        "free_slots": list(scheduler.allocation.free_rows),
        "num_added": scheduler.num_added,
        "num_recomputes": scheduler.preemption.num_recomputes,
        "num_swaps": scheduler.preemption.num_swaps,
        "speculation": None if speculation is None else [type(speculation).__name__, speculation.data()],
    }


def load_scheduler(scheduler: Scheduler, data: Mapping[str, Any], requests: Iterable[Request]) -> None:
    """Bring a fresh scheduler into the state that was saved.

    Args:
        requests: the unfinished ones of those that were saved. Each goes into the queue that its status names; the
            memory has the blocks of those that run or are swapped.
    """
    scheduler.num_added = data["num_added"]
    for request in requests:
        scheduler.restore(request)
    _give_rows(scheduler, data)
    preemption, speculation = scheduler.preemption, scheduler.speculation
    preemption.num_recomputes, preemption.num_swaps = data["num_recomputes"], data["num_swaps"]
    if speculation is not None and data["speculation"] is not None:
        kind, learnt = data["speculation"]
        if kind == type(speculation).__name__:
            speculation.load(learnt)


def _give_rows(scheduler: Scheduler, data: Mapping[str, Any]) -> None:
    """Leave sequences the rows that they had; with another number of rows they get new ones."""
    running = [seq for request in scheduler.running for seq in request.live]
    free = scheduler.allocation.free_rows
    if data["max_num_seqs"] != scheduler.max_num_seqs:
        for seq in running:
            seq.row = free.pop()
        return
    taken, saved = {seq.row for seq in running}, data["free_slots"]
    given_up = [row for row in free if row not in taken and row not in set(saved)]
    free[:] = [row for row in saved if row not in taken] + given_up

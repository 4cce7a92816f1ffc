"""Requests with a history, and what vLLM's documentation says their logits become, in float64."""

from __future__ import annotations

import numpy as np

from jpaged.execution.sampling.registry import EDITS
from jpaged.execution.sampling.sampler import SamplingArrays
from jpaged.execution.sampling.sampling_batch import blank_rows, sampling_arrays
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling import Chunk, Request, Sample, Sequence

VOCAB = 40


def request_of(prompt: list[int], output: list[int], *, bad_words=(), allowed=None, stop_ids=(), **params) -> Request:
    tokens = prompt + output
    seq = Sequence(0, 0, tokens, len(prompt), row=0)
    settings = SamplingParams(max_tokens=None, **params)
    request = Request(0, prompt, settings, 0, 10**6, frozenset(stop_ids), frozenset(), [seq])
    request.bad_words = tuple(map(tuple, bad_words))
    if allowed is not None:
        bits = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
        bits[list(allowed)] = 1
        request.allowed_mask = np.packbits(bits, bitorder="little").view(np.int32)
    return request


def sample_of(request: Request, *, pending: bool, row: int = 0) -> tuple[Sample, int]:
    """The sample that follows a request's tokens, and its newest token where the host is not to know it."""
    (seq,) = request.sequences
    start = len(seq.token_ids) - 1
    newest = seq.token_ids.pop() if pending else 0
    return Sample(request, seq, Chunk(seq, start, 1, row if pending else -1, None)), newest


def args_of(requests: list[Request], *, pending: bool, width: int | None = None):
    """(arrays of all edits, last_tokens) for one step of `requests`."""
    made = [sample_of(request, pending=pending, row=row) for row, request in enumerate(requests)]
    args = sampling_arrays([sample for sample, _ in made], width or len(requests), VOCAB)
    return with_arrays(blank_rows(width or len(requests), VOCAB), *args.edits), np.array([n for _, n in made], np.int32)


def with_arrays(args: SamplingArrays, *arrays) -> SamplingArrays:
    """`args` with the arrays of some edits replaced."""
    by_type = {type(each): each for each in arrays}
    return args._replace(edits=tuple(by_type.get(type(each), each) for each in args.edits))


def arrays_of(args: SamplingArrays, kind: type):
    """The arrays of the edit whose arrays are of this class."""
    (found,) = (arrays for edit, arrays in zip(EDITS, args.edits, strict=True) if edit.arrays is kind)
    return found


def edit_logits(logits, args: SamplingArrays, last_tokens):
    for edit, arrays in zip(EDITS, args.edits, strict=True):
        logits = edit.edit(logits, arrays, last_tokens)
    return logits


def expected_logits(logits, request: Request) -> np.ndarray:
    """Call before the newest token is hidden from the host."""
    (seq,), params = request.sequences, request.params
    output = seq.token_ids[seq.num_prompt :]
    x = np.array(logits, np.float64)
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in set(seq.token_ids):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    for *before, last in request.bad_words:
        if not before or (len(output) >= len(before) and output[-len(before) :] == before):
            x[last] = -np.inf
    if len(output) < params.min_tokens:
        x[list(request.stop_ids)] = -np.inf
    if request.allowed_mask is not None:
        allowed = np.unpackbits(request.allowed_mask.view(np.uint8), bitorder="little")[: len(x)]
        x[allowed == 0] = -np.inf
    return x

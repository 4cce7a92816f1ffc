"""Requests with a history, and what vLLM's documentation says their logits become, in float64."""

from __future__ import annotations

import numpy as np

from jpaged.execution.sampling.logit_edits import logit_edits
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling import Chunk, Request, Sample, Sequence

VOCAB = 40


def request_of(prompt: list[int], output: list[int], *, bad_words=(), allowed=None, stop_ids=(), **params) -> Request:
    tokens = prompt + output
    seq = Sequence(0, 0, tokens, len(prompt), slot=0)
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


def edits_of(requests: list[Request], *, pending: bool, width: int | None = None):
    """(edits, last_tokens) for one step of `requests`."""
    made = [sample_of(request, pending=pending, row=row) for row, request in enumerate(requests)]
    edits = logit_edits([sample for sample, _ in made], width or len(requests), VOCAB)
    return edits, np.array([newest for _, newest in made], np.int32)


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

"""What transformers on torch finds by beam search, and how outputs are compared with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pytest
import torch
from transformers import PreTrainedModel

from jpaged import BeamSearchParams, RequestOutput


class Beam(NamedTuple):
    """One output of a search: its tokens up to and with the one that ended it, and its score."""

    tokens: list[int]
    score: float


def torch_beams(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    params: BeamSearchParams,
    eos: Sequence[int] = (),
    more: Sequence[Mapping[str, torch.Tensor]] | None = None,
    *,
    use_cache: bool = True,
) -> list[list[Beam]]:
    """The outputs for each prompt, best first.

    Args:
        more: what the model is given beside each prompt.
        use_cache: whether transformers goes on from its cache, instead of computing every sequence anew.
    """
    more = [{}] * len(prompts) if more is None else more
    model.generation_config.eos_token_id = list(eos) or None
    model.generation_config.pad_token_id = -1
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [_one(model, prompt, params, others, use_cache) for prompt, others in zip(prompts, more, strict=True)]
    finally:
        torch.set_num_threads(threads)


def _one(
    model: PreTrainedModel,
    prompt: Sequence[int],
    params: BeamSearchParams,
    more: Mapping[str, torch.Tensor],
    use_cache: bool,
) -> list[Beam]:
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=params.max_tokens,
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            do_sample=False,
            use_cache=use_cache,
            return_dict_in_generate=True,
            output_scores=True,
            **more,
        )
    outputs = [[token for token in row if token >= 0] for row in out.sequences[:, len(prompt) :].tolist()]
    return [Beam(tokens, score) for tokens, score in zip(outputs, out.sequences_scores.tolist(), strict=True)]


def common_tokens(beams: Sequence[Sequence[Beam]], count: int) -> list[int]:
    """The tokens that are in most outputs: as end-of-sequence they end some beams and not others."""
    counts = Counter(token for outputs in beams for beam in outputs for token in set(beam.tokens))
    return [token for token, _ in counts.most_common(count)]


def assert_same_beams(
    outputs: Sequence[RequestOutput],
    expected: Sequence[Sequence[Beam]],
    params: BeamSearchParams,
    eos: Sequence[int] = (),
) -> None:
    """Tokens, their order and reasons are equal, scores to 1e-4, and scores are those of the log-probabilities."""
    for output, beams in zip(outputs, expected, strict=True):
        assert [o.token_ids for o in output.outputs] == [beam.tokens for beam in beams]
        assert [o.score for o in output.outputs] == pytest.approx([beam.score for beam in beams], abs=1e-4)
        assert [o.index for o in output.outputs] == list(range(params.beam_width))
        for o in output.outputs:
            assert o.score == pytest.approx(o.cumulative_logprob / len(o.token_ids) ** params.length_penalty)
            assert o.finish_reason == ("stop" if o.token_ids[-1] in eos else "length")
            assert o.stop_reason is None

"""What crosses devices: one all-reduce after attention, one after the MLP, and what the vocabulary needs."""

from __future__ import annotations

from pathlib import Path

import pytest
from collectives_program import EMBED, PER_TOKEN, ROWS, TOKENS, VOCAB
from on_devices import printed_on_devices


@pytest.fixture(scope="module")
def found():
    """The collectives of each model and program."""
    return printed_on_devices(8, Path(__file__).with_name("collectives_program.py"))


@pytest.mark.parametrize(
    ("model", "program"), [("8 KV heads", "decode"), ("8 KV heads", "mixed"), ("2 KV heads", "decode")]
)
def test_a_layer_has_two_all_reduces_and_the_embedding_one(found, model, program):
    """The layers are a loop, whose body stands in the program once."""
    tokens = ROWS if program == "decode" else TOKENS
    crossing = [(c["kind"], c["elements"]) for c in found[model][program]]
    assert crossing == [("all-reduce", tokens * EMBED)] * 3
    assert sorted(c["nested"] for c in found[model][program]) == [False, True, True]


@pytest.mark.parametrize("model", ["experts", "whole experts"])
def test_experts_are_reduced_with_the_mlp_beside_them(found, model):
    """Three chunked layers are a loop and the global one stands alone: twice two all-reduces and the embedding's.

    Experts and the MLP beside them cross devices together, in one operation on both.
    """
    crossing = [(c["kind"], c["elements"]) for c in found[model]["decode"]]
    assert crossing == [("all-reduce", ROWS * EMBED)] * 5


@pytest.mark.parametrize(("model", "a_token"), [("experts of gpt_oss", PER_TOKEN), ("whole experts of gpt_oss", 1)])
def test_a_layer_of_experts_alone_has_two_all_reduces(found, model, a_token):
    """A loop of a local and a global layer. Rows of split experts cross before they are summed to tokens."""
    crossing = [(c["kind"], c["elements"]) for c in found[model]["decode"]]
    layer = [("all-reduce", ROWS * EMBED), ("all-reduce", a_token * ROWS * EMBED)]
    assert crossing == [*layer, *layer, ("all-reduce", ROWS * EMBED)]


def test_greedy_draws_exchange_a_few_numbers_a_row(found):
    """The largest logit, the token it belongs to, the sum of the softmax, the chosen logit."""
    for collective in found["8 KV heads"]["plain sampler"]:
        assert collective["kind"] == "all-reduce"
        assert collective["elements"] <= 2 * ROWS


def test_only_candidates_for_the_most_likely_tokens_are_gathered(found):
    """XLA:CPU gathers the logits themselves for a `top_k`; TPUs and GPUs its results on each device."""
    gathers = [c for c in found["8 KV heads"]["full sampler"] if c["kind"] != "all-reduce"]
    assert [c["kind"] for c in gathers] == ["all-gather"]
    assert gathers[0]["op_name"].endswith("top_k") or not gathers[0]["op_name"]  # jax keeps no name of it from 0.11 on
    assert gathers[0]["elements"] <= ROWS * VOCAB

"""More devices change no token: each family on 8 virtual CPU devices, in a process of its own."""

from pathlib import Path

import jax
import pytest
from checkpoints import make_checkpoint
from greedy_reference import assert_tokens, torch_greedy
from mxfp4_checkpoint import make_mxfp4
from on_devices import printed_on_devices
from test_engine_families import BY_TRANSFORMERS
from tokens_by_devices import LOADS, NUM_TOKENS, PROMPTS

from jpaged import LLM

HERE = Path(__file__).parent


def on_eight_devices(program, *arguments):
    """Return what a program of this folder prints on a process of 8 devices."""
    return printed_on_devices(8, HERE / program, *arguments)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama", [2, 4]),
        pytest.param("llama", [1, 8], marks=pytest.mark.nightly),
        ("deepseek_v2", [4]),
        pytest.param("deepseek_v2", [2], marks=pytest.mark.nightly),
        pytest.param("jamba", [2], marks=pytest.mark.nightly),
        pytest.param("gemma2", [1, 2, 4, 8], marks=pytest.mark.nightly),
        pytest.param("qwen3_5", [4], marks=pytest.mark.nightly),
        pytest.param("olmo3", [4], marks=pytest.mark.nightly),
        pytest.param("qwen2_moe", [2, 4], marks=pytest.mark.nightly),
        pytest.param("minimax_m2", [2], marks=pytest.mark.nightly),
    ],
)
def test_any_number_of_devices_generates_the_tokens_of_transformers(name, sizes, tmp_path):
    """Llama, Gemma-2 and OLMo-3 have 6 heads on 2 KV heads: 4 and 8 shards replicate KV heads and pad query heads.

    Every shard of DeepSeek-V2 holds all latents, for its own of the 6 heads, or of 8 where two are padding. Qwen3.5's
    three key heads stand in eight places on four.
    """
    seed = 1 if name == "jamba" else 0  # seed 0 has two tokens that are nearly level
    expected = torch_greedy(make_checkpoint(name, tmp_path, seed), PROMPTS, NUM_TOKENS)
    found = on_eight_devices("tokens_by_devices.py", tmp_path, "few", *sizes)
    assert list(found) == [str(size) for size in sizes]
    for tokens in found.values():
        assert_tokens(tokens, expected)


@pytest.mark.nightly
@pytest.mark.parametrize("name", BY_TRANSFORMERS)
def test_every_family_on_two_devices_generates_all_that_one_device_is_judged_by(name, tmp_path):
    """Some parts stand on both shards or are padded: Bamba's one group, Mamba-2's nine heads, Gemma 4's three."""
    model, load = make_checkpoint(name, tmp_path), LOADS["all"]
    tokens = on_eight_devices("tokens_by_devices.py", tmp_path, "all", 2)["2"]
    assert_tokens(tokens, torch_greedy(model, load.prompts, load.num_tokens, guesses=tokens))


@pytest.mark.nightly
def test_mxfp4_codes_on_two_devices_generate_the_tokens_of_their_values(tmp_path):
    """The MLP of 96 leaves 48 columns a device: groups of 32 are cut."""
    expected = torch_greedy(make_mxfp4(tmp_path), PROMPTS, NUM_TOKENS)
    found = on_eight_devices("tokens_by_devices.py", tmp_path, "few", 2)["2"]
    assert_tokens(found, expected)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["mamba2", "jamba"])
def test_drafts_on_two_devices_change_no_token(name, tmp_path):
    """States of drafts are split over the devices as the states are."""
    make_checkpoint(name, tmp_path)
    found = on_eight_devices("speculation_by_devices.py", tmp_path, "none", "n-grams")
    assert found["n-grams"]["tokens"] == found["none"]["tokens"]
    assert found["n-grams"]["kept"] > 0


@pytest.mark.nightly
def test_first_layers_of_attention_draft_on_two_devices(tmp_path):
    make_checkpoint("llama", tmp_path)
    found = on_eight_devices("speculation_by_devices.py", tmp_path, "none", "n-grams", "first layers")
    for way in ("n-grams", "first layers"):
        assert found[way]["tokens"] == found["none"]["tokens"] and found[way]["kept"] > 0


def test_more_devices_than_there_are_is_refused_with_both_numbers(tmp_path):
    make_checkpoint("llama", tmp_path)
    there = len(jax.devices())
    with pytest.raises(ValueError, match=rf"tensor_parallel_size={there + 1} is above the {there} cpu device"):
        LLM(str(tmp_path), tensor_parallel_size=there + 1)

"""Two replicas in one program generate what one does, in fewer steps, whatever is asked of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checkpoints import make_checkpoint
from on_devices import printed_on_devices
from tiny_chat_model import byte_level_tokenizer

from jpaged import LLM


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    make_checkpoint("llama", folder)
    byte_level_tokenizer().save_pretrained(folder)
    states = tmp_path_factory.mktemp("states")
    return printed_on_devices(4, Path(__file__).with_name("tokens_of_replicas.py"), folder, states)


def test_batches_samples_beams_streams_and_clients_get_the_tokens_of_one_replica(found):
    assert found["two"] == found["one"]
    assert found["two"]["streamed"] == found["two"]["served"] == [t[0] for t in found["two"]["tokens"][0]]


def test_the_replicas_share_the_work_and_nothing_is_left(found):
    two, one = found["steps"]
    assert two < 0.75 * one
    assert min(found["busiest"]) > 0 and found["left"] == [[0, 0], [0, 0]] and found["emptied"] is True


def test_faults_and_saves_between_a_pass_and_its_draw_change_no_token(found):
    one, two = found["late"]
    assert two == one and found["saved"] == [one, one]
    for name, tokens in found["interrupted"].items():
        assert tokens == one, name


def test_after_the_warm_up_nothing_is_compiled(found):
    assert found["recompiles"] == 0


def test_each_replica_serves_prefixes_from_its_own_cache(found):
    """The last prompt, of 16 tokens or more, was asked of both replicas before or while this batch runs."""
    assert max(found["cached"]) > 0
    assert len({tuple(tokens) for tokens in found["again"]}) == 2


def test_a_pinned_prefix_lies_in_the_pool_of_every_replica(found):
    """24 of the longest prompt's 30 tokens fill blocks of 8; four requests of eight run on each replica."""
    pinned = found["pinned"]
    assert pinned["tokens"] == 24 and pinned["blocks"] == [3, 3]
    assert min(pinned["before"]) == 0 and pinned["while"] == [24] * 8
    assert pinned["emptied"] is False and pinned["left"] == [0, 0]
    assert pinned["again"] == "prefix N is not pinned, or no longer"


@pytest.mark.parametrize("batch", ["read", "read alone"])
def test_scores_of_prompts_and_vectors_are_those_of_one_replica(found, batch):
    """In "read alone" one replica has a prompt whose tokens are scored, and the other one none."""
    one, two = found[batch]
    assert any(one["scores"]) and [[t for t, _ in token] for each in two["scores"] for token in each] == [
        [t for t, _ in token] for each in one["scores"] for token in each
    ]
    ours = [p for each in two["scores"] for token in each for _, p in token]
    theirs = [p for each in one["scores"] for token in each for _, p in token]
    np.testing.assert_allclose(ours, theirs, atol=2e-5)
    np.testing.assert_allclose(two["vectors"], one["vectors"], atol=2e-5)


def test_what_replicas_cannot_do_is_refused(found):
    assert found["refused"] == [
        "replica=2 is not one of the 2 replicas",
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"deterministic": True}, "deterministic=True needs data_parallel_size=1"),
        ({"tensor_parallel_size": 1000}, "data_parallel_size=2 times tensor_parallel_size=1000 is above the"),
    ],
)
def test_settings_that_replicas_cannot_have_are_refused(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        LLM(str(tmp_path), data_parallel_size=2, **settings)

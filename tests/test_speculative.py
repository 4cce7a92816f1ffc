"""The setting `speculative`, and vLLM's name for it."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, asdict, replace
from pathlib import Path

import pytest

from jpaged import MTP, Assistant, DFlash, DraftModel, Eagle3, Layers, NGram
from jpaged.config import EngineConfig
from jpaged.pyramid_kv import PyramidKV
from jpaged.speculative import read_speculative
from jpaged.vllm_compat import engine_settings


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NGram(0), "tokens=0 must be at least 1"),
        (lambda: NGram(shortest=5), "shortest=5 is above longest=4"),
        (lambda: NGram(tokens=2.5), "tokens=2.5 must be an integer"),
        (lambda: Layers(0), "layers=0 must be at least 1"),
        (lambda: Layers(3, tokens=0), "tokens=0"),
        (lambda: MTP(0), "tokens=0 must be at least 1"),
        (lambda: DraftModel(""), "model='' must be a non-empty string"),
        (lambda: Eagle3(" "), "model=' ' must be a non-empty string"),
        (lambda: Eagle3("folder", 0), "tokens=0 must be at least 1"),
        (lambda: DFlash(" "), "model=' ' must be a non-empty string"),
        (lambda: DFlash("folder", 0), "tokens=0 must be at least 1"),
        (lambda: Assistant(""), "model='' must be a non-empty string"),
        (lambda: Assistant("folder", 257), r"tokens=257 must be in \[1, 256\]"),
    ],
)
def test_a_number_out_of_range_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_config_takes_the_text_of_the_flag():
    assert EngineConfig(model="m", speculative="ngram@3").speculative == NGram(3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculative": 5}, "speculative=5 must be an NGram"),
        ({"speculative": "ngrams"}, "speculative='ngrams' is none of ngram, layers:N"),
        (
            {"speculative": NGram(8), "max_num_seqs": 8, "max_num_batched_tokens": 8},
            "speculative.tokens=8 must be below max_num_batched_tokens=8",
        ),
        (
            {"speculative": NGram(), "data_parallel_size": 2},
            r"speculative=NGram\(.*\) needs data_parallel_size=1, not 2",
        ),
        (
            {"speculative": NGram(), "kv_budget": PyramidKV(budget=64), "enable_prefix_caching": False},
            r"speculative=NGram\(.*\) needs kv_budget=None, not PyramidKV\(budget=64",
        ),
    ],
)
def test_settings_that_leave_no_place_for_drafts_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(model="m", **settings)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"method": "ngram", "num_speculative_tokens": 3}, NGram(3, longest=5, shortest=5)),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
            NGram(3, longest=4, shortest=2),
        ),
        ({"model": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2}, NGram(3, longest=2, shortest=2)),
        ({"model": "folder", "num_speculative_tokens": 5}, DraftModel("folder", tokens=5)),
        ({"method": "draft_model", "model": "folder", "num_speculative_tokens": 5}, DraftModel("folder", tokens=5)),
        ({"method": "mtp", "num_speculative_tokens": 1}, MTP()),
        ({"method": "eagle3", "model": "folder", "num_speculative_tokens": 3}, Eagle3("folder", tokens=3)),
        ({"method": "dflash", "model": "folder", "num_speculative_tokens": 7}, DFlash("folder")),
        ({"method": "mtp", "model": "folder", "num_speculative_tokens": 2}, Assistant("folder", tokens=2)),
        ({"method": "gemma4_mtp", "model": "folder", "num_speculative_tokens": 2}, Assistant("folder", tokens=2)),
    ],
)
def test_speculative_config_means_what_it_does_in_vllm(config, wanted):
    assert engine_settings({"speculative_config": config}, EngineConfig) == {"speculative": wanted}


@pytest.mark.parametrize(("way", "tokens"), [(DraftModel, 4), (Eagle3, 3), (Assistant, 3), (DFlash, 7)])
def test_a_way_with_a_folder_is_a_value(way, tokens):
    one = way("a/b")
    assert repr(one) == f"{way.__name__}(tokens={tokens}, model='a/b')"
    assert one == way(Path("a/b"), tokens=tokens) and hash(one) == hash(way("a/b", tokens))
    assert asdict(one) == {"tokens": tokens, "model": "a/b"}
    assert pickle.loads(pickle.dumps(one)) == one == way(**asdict(one))
    assert replace(one, tokens=1) == way("a/b", 1) != one
    assert [other for other in (DraftModel, Eagle3, Assistant, DFlash) if other("a/b", 2) == way("a/b", 2)] == [way]
    with pytest.raises(FrozenInstanceError):
        one.model = "c"


@pytest.mark.parametrize(
    ("model", "engines"), [("a/b", "a/b"), (Path("a/b/"), "a/b"), ("./a/b", Path("a/b").absolute())]
)
def test_vllms_mtp_with_the_engines_own_model_is_its_own_head(model, engines):
    config = {"method": "mtp", "model": model, "num_speculative_tokens": 2}
    assert engine_settings({"speculative_config": config}, EngineConfig, engines) == {"speculative": MTP(2)}
    assert engine_settings({"speculative_config": config}, EngineConfig, "a/c")["speculative"].model == str(model)
    others = {"method": "gemma4_mtp"}, {"method": "draft_model"}
    for other in others:
        found = engine_settings({"speculative_config": config | other}, EngineConfig, engines)
        assert not isinstance(found["speculative"], MTP)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("ngram", "must be a mapping"),
        ({"method": "eagle", "num_speculative_tokens": 3}, "method='eagle' is not one of ngram, draft_model"),
        ({"method": "ngram"}, "num_speculative_tokens is missing"),
        ({"method": "gemma4_mtp", "num_speculative_tokens": 1}, "model is missing"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "tokens=0 must be at least 1"),
        ({"model": "m", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size=2"),
        ({"method": "draft_model", "num_speculative_tokens": 3}, "model is missing"),
        ({"method": "eagle3", "num_speculative_tokens": 3}, "model is missing"),
        ({"method": "dflash", "num_speculative_tokens": 3}, "model is missing"),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 3},
            "shortest=3",
        ),
    ],
)
def test_what_has_no_meaning_here_is_refused_by_its_key(config, message):
    with pytest.raises(ValueError, match=message):
        engine_settings({"speculative_config": config}, EngineConfig)


def test_the_two_names_of_the_setting_exclude_each_other():
    config = {"method": "ngram", "num_speculative_tokens": 3}
    with pytest.raises(ValueError, match="one setting"):
        engine_settings({"speculative_config": config, "speculative": NGram()}, EngineConfig)
    assert engine_settings({"speculative_config": None, "speculative": None}, EngineConfig) == {}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (None, None),
        ("ngram", NGram()),
        ("ngram@3", NGram(3)),
        ("layers:8", Layers(8)),
        ("layers:8@2", Layers(8, tokens=2)),
        ("draft:a/b@6", DraftModel("a/b", tokens=6)),
        ("mtp", MTP()),
        ("mtp@3", MTP(3)),
        ("eagle3:a/b@2", Eagle3("a/b", tokens=2)),
        ("dflash:a/b@5", DFlash("a/b", tokens=5)),
        ("assistant:a/b@2", Assistant("a/b", tokens=2)),
    ],
)
def test_the_command_line_names_a_way_to_draft(text, wanted):
    assert read_speculative(text) == wanted


@pytest.mark.parametrize(
    "text", ["ngram:3", "layers", "layers:x", "draft:", "mtp:1", "eagle", "eagle3:", "assistant", "dflash:", ""]
)
def test_the_command_line_refuses_what_is_no_way_to_draft(text):
    with pytest.raises(ValueError, match="is none of ngram"):
        read_speculative(text)

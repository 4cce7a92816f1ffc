"""generation_config.json: which tokens end a generation, which sampling it advises, and whose file is read."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from jpaged.loading.generation_config import file_fields, read_generation_config, usable_end_ids
from jpaged.loading.source import Source


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    return tmp_path


def write(folder, fields):
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return str(folder)


def read(folder, chosen="auto", tokenizer=None):
    return read_generation_config(chosen, Source("m", "safetensors", folder), None, tokenizer)


def test_the_models_file_names_the_ends_and_the_sampling(folder):
    write(folder, {"eos_token_id": [5, 6], "temperature": 0.6, "top_p": 0.9, "max_new_tokens": 50, "do_sample": True})
    found = read(folder)
    assert found.eos_token_ids == (5, 6)
    assert found.sampling == {"temperature": 0.6, "top_p": 0.9, "max_tokens": 50}


def test_without_a_file_the_config_names_the_ends_and_nothing_is_advised(folder):
    assert read(folder).eos_token_ids == (7,)
    assert read(folder).sampling == {}


def test_the_tokenizers_own_end_counts_too_and_once(folder):
    write(folder, {"eos_token_id": [5, 6]})
    assert read(folder, tokenizer=SimpleNamespace(eos_token_id=2)).eos_token_ids == (5, 6, 2)
    assert read(folder, tokenizer=SimpleNamespace(eos_token_id=6)).eos_token_ids == (5, 6)
    assert read(folder, tokenizer=SimpleNamespace(eos_token_id=None)).eos_token_ids == (5, 6)


def test_vllms_defaults_keep_the_models_ends(folder):
    write(folder, {"eos_token_id": [5, 6], "temperature": 0.6})
    assert read(folder, "vllm").eos_token_ids == (5, 6)
    assert read(folder, "vllm").sampling == {}


def test_another_folder_takes_the_place_of_the_models_file(folder):
    write(folder, {"eos_token_id": 5, "temperature": 0.6})
    other = write(folder / "other", {"eos_token_id": 9, "top_k": 3})
    assert (read(folder, other).eos_token_ids, read(folder, other).sampling) == ((9,), {"top_k": 3})
    silent = write(folder / "silent", {"top_k": 3})
    assert read(folder, silent).eos_token_ids == (5,)


def test_a_folder_without_the_file_is_named(folder):
    with pytest.raises(ValueError, match="generation_config='nowhere' is not 'auto', 'vllm' or a folder with"):
        read(folder, "nowhere")


def test_advice_that_cannot_be_followed_is_named_with_what_ignores_it(folder):
    write(folder, {"temperature": -1})
    with pytest.raises(ValueError, match=r"generation_config.json advises .*temperature=-1 .*generation_config='vllm'"):
        read(folder)
    assert read(folder, "vllm").sampling == {}


def test_a_damaged_file_is_named(folder):
    (folder / "generation_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"generation_config.json holds list, not a JSON object"):
        read(folder)


NUMBERS = ("hot", True, [1], {"a": 1}, float("nan"), float("inf"), -7.5, [], "0.5")
WHOLE = ("5", True, [1], {"a": 1}, 3.5, float("nan"), -7, [], 2**70)
ENDS = ("x", True, 1.5, {"a": 1}, float("nan"), ["x"], [1, None], [[1]], [True], [2, 0.5], "2")
WRONG = dict.fromkeys(("repetition_penalty", "temperature", "top_p", "min_p"), NUMBERS) | dict.fromkeys(
    ("top_k", "max_new_tokens"), WHOLE
)


@pytest.mark.parametrize(("field", "wrong"), [*WRONG.items(), ("eos_token_id", ENDS)])
def test_a_field_of_a_wrong_type_or_value_is_named_with_its_file(folder, field, wrong):
    for value in wrong:
        named = write(folder, {field: value})
        for chosen in ("auto", named):
            with pytest.raises(ValueError, match=rf"{folder}/generation_config\.json.*{field}"):
                read(folder, chosen)
        if field != "eos_token_id":
            assert read(folder, "vllm").sampling == {}
    write(folder, {field: None})
    assert (read(folder).eos_token_ids, read(folder).sampling) == ((7,), {})


@pytest.mark.parametrize("wrong", ENDS)
def test_ends_of_a_wrong_type_in_the_config_are_named_with_it(folder, wrong):
    for fields in ({"eos_token_id": wrong}, {"text_config": {"eos_token_id": wrong}}):
        (folder / "config.json").write_text(json.dumps(fields))
        with pytest.raises(ValueError, match=r"/config\.json: eos_token_id=.* must be an integer, or a list"):
            read(folder)


@pytest.mark.parametrize("text", [b"", b"  ", b"[1]", b"7", b"null", b"{", b"\xff\xfe{}", b"[" * 99999, None])
def test_a_file_that_is_no_table_is_named(folder, text):
    file = folder / "generation_config.json"
    file.mkdir() if text is None else file.write_bytes(text)
    for chosen in ("auto", str(folder)):
        with pytest.raises(ValueError, match=rf"{file} "):
            read(folder, chosen)


def test_what_is_written_reads_back_the_same(folder):
    fields = {"eos_token_id": [5, 6], "temperature": 0.6, "max_new_tokens": 50}
    write(folder, fields)
    found = read(folder)
    assert file_fields(found.eos_token_ids, found.sampling) == fields


def test_ends_that_the_model_cannot_draw_are_dropped_with_a_warning():
    assert usable_end_ids((5, 6), 7, "m") == (5, 6)
    with pytest.warns(UserWarning, match=r"m: eos_token_id=\[7, 2147483648, -1, 'x'\] is ignored: .* 7 logits"):
        assert usable_end_ids((5, 7, 2**31, -1, "x"), 7, "m") == (5,)
    assert usable_end_ids((), 7, "m") == ()


def test_ends_none_of_which_the_model_can_draw_are_an_error():
    with pytest.raises(ValueError, match=r"m: eos_token_id=\[7, 9\] names no token below the model's 7 logits"):
        usable_end_ids((7, 9), 7, "m")

"""Which sizes of attention's launches are tried, and which the kernel takes afterwards."""

import json

import pytest

from pallas_kernels.paged_attention import tpu_plan
from scripts.compiled_code import tpu_tune
from scripts.compiled_code.tpu_kernels import SHAPES

HEADS = SHAPES["llama-3.1-8b"]


@pytest.fixture(autouse=True)
def table(tmp_path, monkeypatch):
    """A table of no sizes."""
    file = tmp_path / "tpu_sizes.json"
    file.write_text("{}")
    monkeypatch.setattr(tpu_plan, "SIZES", file)
    monkeypatch.setattr(tpu_tune, "version", lambda package: f"{package} 1")
    tpu_plan.read_sizes.cache_clear()
    yield file
    tpu_plan.read_sizes.cache_clear()


@pytest.mark.parametrize("batch", tpu_tune.CANDIDATES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_rules_are_tried_first_and_no_sizes_twice(shape, batch):
    heads = SHAPES[shape]
    rules = tpu_plan.rules_of("v6e", heads.kv, heads.lanes)
    first, *others = [rules._replace(**sizes) for sizes in tpu_tune.sizes_to_try("v6e", heads, batch, 128)]
    assert first == rules
    assert rules not in others and len({*others}) == len(others)
    assert others or (batch, heads.kv, heads.rank) == ("decode", 1, None)


def test_sizes_with_which_a_decode_has_the_same_steps_are_tried_once():
    """A step of one head has 4,096 keys with all of them; one of eight has 1,024 with twice the scores, as they are 4
    MiB; one of eight of 64 lanes has twice as many with twice the scores."""

    def tried(shape, block_size=128):
        changes = tpu_tune.sizes_to_try("tpu7x", SHAPES[shape], "decode", block_size)
        return [sizes.get("decode_scores", 2**16) for sizes in changes]

    assert tried("llama-3.1-8b x8") == [2**16]
    assert tried("llama-3.1-8b") == [2**16, 2**15]
    assert tried("gpt-oss-20b") == [2**16, 2**15, 2**17]
    assert tried("gpt-oss-20b", 16) == [2**16, 2**15]  # of 64 pages at most


def test_a_kernel_takes_the_sizes_of_its_chip_and_shape_alone(table):
    tpu_tune.keep("v6e", HEADS, {"tile_rows": 512})
    tpu_tune.keep("v6e", HEADS, {"decode_scores": 2**15})
    rules, of_shape = tpu_plan.rules_of("v6e", 8, 128), tpu_plan.tuning_of("TPU v6 lite", 8, 128, 4)
    assert of_shape == rules._replace(tile_rows=512, decode_scores=2**15)
    assert tpu_plan.tuning_of("TPU v6 lite", 8, 128, 2) == tpu_plan.tuning_of("TPU v6 lite", 8, 128) == rules
    assert tpu_plan.tuning_of("TPU7x", 8, 128, 4) == tpu_plan.rules_of("tpu7x", 8, 128)
    assert json.loads(table.read_text())["versions"] == {"jax": "jax 1", "libtpu": "libtpu 1"}


def test_sizes_that_are_the_rules_are_not_listed(table):
    tpu_tune.keep("v6e", HEADS, {})
    assert json.loads(table.read_text())["v6e"] == {}


def test_the_rules_win_unless_others_are_faster_by_two_percent(monkeypatch):
    monkeypatch.setattr(tpu_tune, "need_compiler", lambda target: None)
    times = {2**16: 100.0, 2**15: 99.0, 2**17: 97.0}

    def times_of(target, heads, batch, block_size, sizes, dumps):
        return times[sizes.get("decode_scores", 2**16)], 0.0

    monkeypatch.setattr(tpu_tune, "times_of", times_of)
    rows = list(tpu_tune.tune(["v6e"], ["gpt-oss-20b"], ["decode"], write=True))
    assert [row["best so far"] for row in rows] == [True, False, True]
    assert tpu_plan.tuning_of("TPU v6 lite", 8, SHAPES["gpt-oss-20b"].lanes, 8).decode_scores == 2**17


def test_every_size_in_the_package_is_a_field_of_the_kernels_sizes(monkeypatch):
    monkeypatch.undo()
    tpu_plan.read_sizes.cache_clear()
    shapes = [sizes for name, chip in tpu_plan.read_sizes().items() if name != "versions" for sizes in chip.values()]
    assert {field for sizes in shapes for field in sizes} <= set(tpu_plan.Tuning._fields)

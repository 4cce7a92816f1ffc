"""Measured tiles take the place of the rules on the chip they were measured on; the timers are made up."""

import json

import pytest

from pallas_kernels.gpu_launch import compiling_for
from pallas_kernels.paged_attention import gpu_shapes
from pallas_kernels.paged_attention.gpu_shapes import (
    GAIN,
    Tiles,
    add,
    candidates,
    decode_tiles,
    fastest,
    key_of,
    measured_tiles,
    read,
)

RULES = decode_tiles(4, 128, 2)
BETTER = Tiles(RULES.rows, 128, 8, 2)
CHIP = "NVIDIA H200"


@pytest.fixture
def table(tmp_path, monkeypatch):
    file = tmp_path / "tiles.json"
    file.write_text("{}")
    monkeypatch.setattr(gpu_shapes, "FILE", file)
    return file


def test_the_fastest_tiles_are_found_and_those_that_do_not_fit_are_passed_over():
    tried = []

    def seconds_of(tiles):
        tried.append(tiles)
        if tiles.num_stages == 4:
            raise RuntimeError("out of shared memory")
        return 1.0 if tiles == BETTER else 2.0

    assert fastest(RULES, seconds_of) == BETTER
    assert tried[0] == RULES
    assert sorted(tried) == sorted(set(candidates(RULES)))


def test_a_gain_within_the_noise_changes_nothing():
    assert fastest(RULES, lambda tiles: 1.0 if tiles == RULES else GAIN + 0.001) == RULES


def test_the_search_ends_when_there_is_no_more_time():
    tried = []
    found = fastest(RULES, lambda tiles: tried.append(tiles) or 1.0 / len(tried), more_time=lambda: len(tried) < 3)
    assert len(tried) == 3
    assert found == tried[-1]


def test_tiles_that_the_rules_name_have_to_run():
    def fails(tiles):
        raise RuntimeError("no GPU")

    with pytest.raises(RuntimeError, match="no GPU"):
        fastest(RULES, fails)


def test_a_chip_takes_its_own_measured_tiles_and_others_take_the_rules(table):
    add(table, CHIP, {key_of("decode", 4, 128, 2, RULES.rows): BETTER})
    for chip, tiles in ((CHIP, BETTER), ("NVIDIA L4", RULES), ("", RULES)):
        with compiling_for(90, chip):
            assert measured_tiles("decode", 4, 128, 2, RULES) == tiles
    with compiling_for(90, CHIP):
        assert measured_tiles("decode", 8, 128, 2, RULES) == RULES
        assert measured_tiles("prefill", 4, 128, 2, RULES) == RULES


def test_tiles_that_are_tried_are_taken_whatever_the_table_says(table):
    with gpu_shapes.with_tiles(BETTER):
        assert measured_tiles("decode", 4, 128, 2, RULES) == BETTER


def test_what_is_measured_later_is_added_and_takes_the_place_of_the_same_shape(table):
    add(table, CHIP, {"a": RULES, "b": RULES})
    add(table, "NVIDIA L4", {"a": RULES})
    add(table, CHIP, {"b": BETTER})
    assert read(table) == {CHIP: {"a": RULES, "b": BETTER}, "NVIDIA L4": {"a": RULES}}
    assert list(json.loads(table.read_text())) == ["NVIDIA H200", "NVIDIA L4"]


def test_an_entry_that_is_no_tiles_is_refused(table):
    table.write_text(json.dumps({CHIP: {"a": [16, 64, 0, 2]}}))
    with pytest.raises(ValueError, match=r"\[16, 64, 0, 2\] of 'NVIDIA H200', 'a' are not rows"):
        read(table)


def test_the_table_that_is_shipped_can_be_read():
    assert isinstance(read(gpu_shapes.FILE), dict)

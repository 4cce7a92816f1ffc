"""Prefixes of recurrent models in the simulation: small blocks are found where blocks as large as a state are not."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from jpaged import planning
from jpaged.benchmarks import memory_hybrids
from jpaged.benchmarks.memory_hybrids import HYBRIDS, draw_instructed, inflated, rows, run
from jpaged.benchmarks.memory_simulation import known_before, simulate
from jpaged.cli.main import app
from jpaged.execution.caches.base import BlockFormat, group_specs
from jpaged.execution.caches.registry import layer_caches
from jpaged.loading.open_checkpoint import described
from jpaged.loading.parameters.targets import abstract_model
from jpaged.model_api import BuildContext

BY_NAME = {shape.name: shape for shape in HYBRIDS}
PUBLISHED = Path(planning.__file__).parent / "shapes"


@pytest.mark.parametrize(("name", "published"), [("Bamba-9B", "bamba-9b"), ("Qwen3-Next-80B", "qwen3-next-80b-a3b")])
def test_the_simulated_blocks_are_the_engines(name, published, tmp_path):
    """A state's parts are whole rows in the engine, which are a little more."""
    shutil.copy(PUBLISHED / f"{published}.json", tmp_path / "config.json")
    config, family = described(tmp_path)
    dtype = jnp.dtype(jnp.bfloat16)
    groups = abstract_model(family, config, BuildContext(dtype=dtype)).layer_groups
    real = {(g.num_layers, g.real_bytes) for g in group_specs(layer_caches(groups, BlockFormat(16, dtype, 1)))}
    simulated = {(g.num_layers, g.real_bytes) for g in BY_NAME[name].groups()}
    for ours, wanted in zip(sorted(simulated), sorted(real), strict=True):
        assert ours[0] == wanted[0] and ours[1] == pytest.approx(wanted[1], rel=0.01)


def test_inflated_blocks_of_all_groups_are_of_one_size_and_hold_a_state():
    tokens = {}
    for name, shape in BY_NAME.items():
        large = inflated(shape)
        attention, states = shape.layers
        assert len({group.real_bytes for group in large.groups()}) == 1
        assert len(large.groups()) == 1 + -(-states.number // attention.number)
        page = large.block_tokens * attention.token_bytes
        assert states.token_bytes <= page < states.token_bytes + 16 * attention.token_bytes
        tokens[name] = large.block_tokens
    assert tokens == {"Jamba-1.5-Mini": 144, "Bamba-9B": 1040, "Qwen3-Next-80B": 1056}


def test_an_instruction_shorter_than_an_inflated_block_is_found_in_small_blocks_only():
    shape, asked = replace(BY_NAME["Qwen3-Next-80B"], pool_gib=12), draw_instructed(60, seed=0)
    assert sum(known_before(asked)) > 30 * memory_hybrids.INSTRUCTION_TOKENS
    small, large = (simulate("jpaged", of, asked, prefix_caching=True).reuse for of in (shape, inflated(shape)))
    assert small > 0.5 and large == 0


def test_the_table_has_a_row_for_each_size_of_blocks_and_order_of_eviction():
    said = []
    found = run(20, 0, said.append, [replace(BY_NAME["Jamba-1.5-Mini"], pool_gib=8)])
    head, cells = rows(found)
    assert head == ["model", "tokens of a block", "prefix_eviction", *memory_hybrids.workloads(20, 0)]
    assert [row[:3] for row in cells] == [
        ["Jamba-1.5-Mini", "16", "predicted"],
        ["Jamba-1.5-Mini", "144", "predicted"],
        ["Jamba-1.5-Mini", "144", "lru"],
    ]
    assert said == ["Jamba-1.5-Mini, prefixes"]


def test_the_command_prints_the_table_alone_and_takes_no_files_for_it(tmp_path, monkeypatch):
    asked = []
    made = run(20, 0, asked.append, [replace(BY_NAME["Jamba-1.5-Mini"], pool_gib=8)])
    monkeypatch.setattr(memory_hybrids, "run", lambda requests, seed, say: asked.append((requests, seed)) or made)
    shown = CliRunner().invoke(app, ["bench", "memory", "--hybrids-only", "--num-requests", "20", "--seed", "1"])
    assert shown.exit_code == 0, shown.output
    assert asked[-1] == (20, 1) and "| Jamba-1.5-Mini | 144 | lru |" in shown.output
    refused = CliRunner().invoke(app, ["bench", "memory", "--hybrids-only", "--docs", str(tmp_path)])
    assert refused.exit_code == 2 and "requests and prints: --docs" in " ".join(refused.output.replace("│", "").split())

"""`jpaged compile --device` with the real compilers: the folder has every program of an engine on such devices."""

from __future__ import annotations

import pytest
from checkpoints import CHECKPOINTS, make_checkpoint
from environments import python_of

from jpaged import LLM
from jpaged.execution.compile.store import read_manifest
from jpaged.planning import compile_programs_for

pytestmark = [pytest.mark.aot, pytest.mark.nightly]

SETTINGS = {"dtype": "bfloat16", "max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 256}
SHAPES = {"block copy": 1, "steps": 3, "samplers": 4}


@pytest.mark.parametrize(
    ("device", "compiler", "kind", "devices"),
    [
        ("v5e-8", "tpu", "TPU v5 lite", 8),
        ("h200", "cuda", "NVIDIA H200", 1),
    ],
)
def test_programs_for_devices_that_are_not_here_are_written_and_refused_here(device, compiler, kind, devices, tmp_path):
    CHECKPOINTS["llama"].to_json_file(tmp_path / "config.json")
    environment = python_of(compiler).parents[1]
    number, size = compile_programs_for(
        tmp_path / "config.json", device, tmp_path / "programs", compiler_env=environment, **SETTINGS
    )
    manifest = read_manifest(tmp_path / "programs")
    assert number == len(manifest["files"]) == sum(SHAPES.values())
    assert size == sum((tmp_path / "programs" / name).stat().st_size for name in manifest["files"]) > 100_000
    facts = manifest["facts"]
    assert (facts["device_kind"], facts["devices"]) == (kind, [["tensor", devices]])
    assert facts["settings.tensor_parallel_size"] == devices and facts["pool_bytes"] > 100_000
    make_checkpoint("llama", tmp_path / "model")
    with pytest.raises(ValueError, match=r"was compiled for platform='[tg]pu', and this engine has 'cpu'"):
        LLM(str(tmp_path / "model"), compiled_programs=str(tmp_path / "programs"), **SETTINGS | {"dtype": "float32"})

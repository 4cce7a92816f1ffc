"""`jpaged plan` with the real compilers: what they say is what the plan says."""

from __future__ import annotations

import json

import pytest
from environments import python_of, run_program
from thorough import rarely

from jpaged.planning import find_device, plan
from jpaged.planning.target_mesh import TPU_HOST

pytestmark = pytest.mark.aot


def test_a_tpus_memory_is_what_its_compiler_allows(monkeypatch):
    for name, value in TPU_HOST.items():
        monkeypatch.setenv(name, value)
    names = ["v5e-8", "v6e-8", "v5p-8", "tpu7x-8"]
    allowed = json.loads(run_program("tpu", "tpu_memory_program.py", *names).splitlines()[-1])
    for name in names:
        assert find_device(name).chip.limit / (1 << 30) == pytest.approx(allowed[name], abs=0.005)


@pytest.mark.parametrize(("device", "compiler"), [rarely("v6e-1", "tpu"), rarely("l4", "cuda")])
def test_the_compiler_accounts_for_what_was_planned(device, compiler):
    """Weights and pool are the decode step's arguments, but for the batch; they and temporaries are within the chip."""
    sizes = {"context": 1024, "concurrency": 8, "max_num_batched_tokens": 64}
    made = plan("qwen3-0.6b", device, compiler_env=python_of(compiler).parents[1], **sizes)
    assert made.fits and made.sequences == 8
    assert made.compiler.startswith({"tpu": "libtpu", "cuda": "jax-cuda"}[compiler])
    decode = made.programs[0]
    assert decode.argument_bytes == pytest.approx(made.weight_bytes + made.pool_bytes, rel=0.02)
    for program in made.programs:
        assert program.temporary_bytes <= made.temporary_bytes or program is decode
        assert made.weight_bytes + made.pool_bytes + program.temporary_bytes <= made.usable_bytes

"""`jpaged plan` with the real compilers: what they say is what the plan says."""

from __future__ import annotations

import json

import pytest
from environments import python_of, run_program

from jpaged.planning import find_device, plan
from jpaged.planning.targets import TPU_HOST

pytestmark = pytest.mark.aot


def test_a_tpus_memory_is_what_its_compiler_allows(monkeypatch):
    for name, value in TPU_HOST.items():
        monkeypatch.setenv(name, value)
    names = ["v5e-8", "v6e-8", "v5p-8", "tpu7x-8"]
    allowed = json.loads(run_program("tpu", "tpu_memory_program.py", *names).splitlines()[-1])
    for name in names:
        assert find_device(name).chip.limit / (1 << 30) == pytest.approx(allowed[name], abs=0.005)


@pytest.mark.parametrize(("model", "device"), [("llama-3.3-70b", "v6e-8"), ("qwen3-0.6b", "l4")])
def test_the_compiler_accounts_for_what_was_planned(model, device):
    """Weights and pool are the decode step's arguments, but for the batch; they and temporaries are within the chip."""
    target = "tpu" if device == "v6e-8" else "cuda"
    made = plan(model, device, context=2048, concurrency=16, compiler_env=python_of(target).parents[1])
    assert made.fits and made.sequences == 16
    decode = made.programs[0]
    assert decode.argument_bytes == pytest.approx(made.weight_bytes + made.pool_bytes, rel=0.02)
    for program in made.programs:
        assert program.temporary_bytes <= made.temporary_bytes or program is decode
        assert made.weight_bytes + made.pool_bytes + program.temporary_bytes <= made.usable_bytes

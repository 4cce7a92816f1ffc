"""Programs compiled from shapes alone."""

from __future__ import annotations

import pytest
from tiny_model import VOCAB, plan, tiny_llama

from jpaged.execution import make_mesh
from jpaged.execution.device_memory import program_size
from jpaged.execution.lowering import StepPrograms

SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64, "vocab_size": VOCAB}


@pytest.fixture(scope="module")
def programs():
    graphdef, params, groups = tiny_llama()
    return StepPrograms(graphdef=graphdef, params=params, spec=plan(groups, 24), mesh=make_mesh(1), **SIZES)


def test_temporaries_of_the_largest_step_are_known_without_running_it(programs):
    sizes = [program_size(name, getattr(programs, name)()) for name in ("mixed", "sampler")]
    assert all(0 < size.temporary_bytes < 16 << 20 for size in sizes)


def test_a_program_has_the_shapes_of_the_largest_bucket(programs):
    for lowered, tokens in ((programs.decode(), 4), (programs.mixed(), 16), (programs.verifying(), 16)):
        pool, sampled, hidden = lowered.out_info
        assert pool.shape == programs.spec.shape
        assert (sampled.shape, hidden.shape) == ((4, 32), (tokens, 32))
    assert programs.sampler().out_info.tokens.shape == (4,)

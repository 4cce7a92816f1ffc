"""A kernel that waits less, or reads more or less than it has to, does not pass as a faster one."""

import json

import pytest
from environments import run_program

pytestmark = [pytest.mark.aot, pytest.mark.nightly]


@pytest.mark.parametrize("name", ["v6e/llama-3.1-8b x8/kv_write decode", "v6e/qwen3-next x8 delta/recurrent"])
def test_each_wait_and_each_dma_of_a_kernel_counts(name):
    """Some are on ways that this launch does not take: then neither attempt at them changes anything."""
    (_, whole), *attempts = [json.loads(line) for line in run_program("tpu", "sabotage_program.py", name).splitlines()]
    assert len(whole) == 2  # cycles and bytes; an attempt may have an error instead
    found = dict(attempts)
    assert len(found) == len(attempts)
    for one, other in (("a wait less", "a wait longer"), ("a DMA less", "a DMA twice")):
        lines = [attempt.removeprefix(one) for attempt in found if attempt.startswith(one)]
        counts = {line: found[one + line] != whole for line in lines}
        assert counts == {line: found[other + line] != whole for line in lines}
        assert sum(counts.values()) >= 2
        errors = [kind + line for line, does in counts.items() if does for kind in (one, other)]
        assert all(len(found[attempt]) == 1 for attempt in errors if "longer" not in attempt)

"""A kernel that waits less, or reads more or less than it has to, does not pass as a faster one."""

import json

import pytest
from environments import run_program

pytestmark = [pytest.mark.aot, pytest.mark.nightly]


@pytest.mark.parametrize("name", ["v6e/llama-3.1-8b x8/kv_write decode", "v6e/llama-3.1-8b x8/decode"])
def test_each_wait_and_each_dma_of_a_kernel_counts(name):
    (_, whole), *attempts = [json.loads(line) for line in run_program("tpu", "sabotage_program.py", name).splitlines()]
    assert len(whole) == 2
    kinds = {kind: [found for attempt, found in attempts if attempt.startswith(kind)] for kind in KINDS}
    assert all(kinds.values())
    for attempt, found in attempts:
        assert len(found) == 1 or found != whole, attempt
    for found in [*kinds["a DMA less"], *kinds["a DMA twice"]]:
        assert len(found) == 1, found


KINDS = ("a wait less", "a DMA less", "a DMA twice")

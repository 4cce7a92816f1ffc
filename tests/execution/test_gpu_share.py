"""The share of a GPU that JAX is asked to take."""

from __future__ import annotations

import pytest

from jpaged.execution.device_memory import GPU_SHARE, VARIABLES, claim_gpu_share, gpu_share


def test_the_engine_asks_for_more_than_xlas_default():
    environment: dict[str, str] = {}
    claim_gpu_share(environment)
    assert environment == {"XLA_CLIENT_MEM_FRACTION": str(GPU_SHARE)}
    assert gpu_share(environment) == GPU_SHARE > 0.75


@pytest.mark.parametrize("name", VARIABLES)
def test_a_users_choice_stays_and_counts(name):
    environment = {name: "0.5"}
    claim_gpu_share(environment)
    assert environment == {name: "0.5"}  # XLA refuses both names at once
    assert gpu_share(environment) == 0.5

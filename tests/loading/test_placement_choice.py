"""Which layers are stacked where."""

import pytest

from jpaged.loading.placement import layers_are_stacked


@pytest.mark.parametrize(
    ("platform", "kernels", "stacked"),
    [("tpu", "tpu", True), ("gpu", "xla", True), ("cuda", "xla", True), ("gpu", "gpu", False), ("cpu", None, False)],
)
def test_tpus_scan_over_stacks_and_so_do_gpus_that_run_xlas_attention(platform, kernels, stacked):
    assert layers_are_stacked(platform, kernels) is stacked

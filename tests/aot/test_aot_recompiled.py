"""Kernels of the calibration that a package has, compiled again: their simulated times are those of its rows."""

import subprocess
import zipfile

import pytest
from environments import python_of, run_case

pytestmark = [pytest.mark.aot, pytest.mark.nightly]

OTHER_LAUNCH = "gmm2-512-4096-256-fp8"
"""Starts 153 DMAs, and the row's launch 83: it had other tiles, which the row does not name."""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tpu-inference")
    get = [python_of("tpu"), "-m", "pip", "download", "--quiet", "--no-deps", "tpu-inference==0.25.0", "-d", folder]
    if subprocess.run(get, capture_output=True).returncode:
        pytest.skip("tpu-inference 0.25.0 could not be downloaded")
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def test_recompiled_kernels_take_as_long_as_the_calibration_says(package):
    rows = run_case("tpu", "tpu-calibration", "--folder", str(package))
    ratios = {row["kernel"]: row["of the calibration's"] for row in rows}
    assert len(ratios) == 5
    assert ratios.pop(OTHER_LAUNCH) == pytest.approx(1, abs=0.07)
    assert ratios == {name: pytest.approx(1, abs=0.02) for name in ratios}

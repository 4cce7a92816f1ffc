# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A first run on your device
#
# jpaged's kernels were written, compiled and simulated on machines without a TPU or GPU. This notebook checks each of
# them on the device that you have, measures how fast they and the engine are, and leaves one JSON file. **Please send
# us that file**, right or wrong: attach it to an issue. It names neither you nor your host.
#
# On Colab take a T4 GPU, on Kaggle a TPU v5e-8, or any other TPU or NVIDIA GPU. It takes about 20 minutes; on a CPU it
# runs a trial of itself in two.

# %%
import importlib.util
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

# Where jpaged comes from: the address of its repository, the folder of a checkout, or a wheel. A checkout that this
# notebook is in is found; elsewhere write one of them here, or into the environment variable JPAGED_SOURCE.
SOURCE = ""  # scripts/colab/sync.py writes the address of pyproject.toml here

warnings.filterwarnings("ignore", ".*(IProgress not found|ipywidgets)")  # without ipywidgets, bars are text
around = [str(folder) for folder in (Path.cwd(), *Path.cwd().parents) if (folder / "scripts/colab/sync.py").is_file()]
SOURCE = os.environ.get("JPAGED_SOURCE") or next(iter(around), SOURCE)
if importlib.util.find_spec("jpaged") is None:
    if "://" not in SOURCE and not (SOURCE and Path(SOURCE).exists()):
        raise RuntimeError(
            f"SOURCE={SOURCE!r}: write an address, a checkout's folder or a wheel there, or JPAGED_SOURCE"
        )
    on_tpu = "TPU_ACCELERATOR_TYPE" in os.environ or any(map(os.path.exists, ("/dev/accel0", "/dev/vfio/0")))
    device = "tpu" if on_tpu else "cuda12" if shutil.which("nvidia-smi") else "cpu"
    where = f"git+{SOURCE}" if "://" in SOURCE else Path(SOURCE).resolve().as_uri()
    package = f"jpaged[{device},notebooks] @ {where}"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", package], check=True)

# %% [markdown]
# The checks are not part of the installed package: they come with a checkout of the repository, which `SOURCE` is or is
# the address of.

# %%
checkout = Path("jpaged-checkout" if "://" in SOURCE else SOURCE)
if not (checkout / "scripts" / "first_run.py").exists():
    if "://" not in SOURCE:
        raise RuntimeError(f"SOURCE={SOURCE!r} is no checkout: write its folder, or an address, into the first cell")
    subprocess.run(["git", "clone", "--quiet", "--depth=1", SOURCE, str(checkout)], check=True)

# %% tags=["parameters"]
MINUTES = 25

# %% [markdown]
# ## Run
#
# A line for each check: how far the device is from float64, or from the short reference of the same kernel. The run
# happens in a process of its own, so that a kernel that brings the device down does not take the notebook with it.

# %%
import tempfile

file = Path("first_run.json").resolve()
file.unlink(missing_ok=True)  # of an earlier run
log = tempfile.TemporaryFile("w+")
command = [sys.executable, "-m", "scripts.first_run", "--out", str(file), "--minutes", str(MINUTES)]
with subprocess.Popen(command, cwd=checkout, stdout=subprocess.PIPE, stderr=log, text=True) as running:
    assert running.stdout is not None
    for line in running.stdout:
        print(line[:160].rstrip())
if not file.exists() or running.returncode not in (0, 1):  # 1: something was found to be wrong
    log.seek(0)
    print(f"the run broke off with status {running.returncode}:\n{log.read()[-2000:]}")
log.close()

# %% [markdown]
# ## What was found
#
# Each bar is the largest error of a kernel as a share of what is allowed: right if it ends before the line.

# %%
import json

import matplotlib.pyplot as plt

found = json.loads(file.read_text())
worst: dict[str, float] = {}
for check in found["checks"]:
    name = check["check"].replace(",", " ").split()[0]
    share = check["error"] / check["limit"] if check["limit"] else float(check["error"] > 0) * 10
    worst[name] = max(worst.get(name, 0.0), min(share, 10.0))
figure, axes = plt.subplots(figsize=(7, 0.35 * len(worst) + 1), layout="constrained")
axes.barh(list(worst), list(worst.values()), color=["tab:red" if share > 1 else "tab:blue" for share in worst.values()])
axes.axvline(1.0, color="black", linewidth=1)
axes.set_xlabel("largest error as a share of the allowed error")
axes.set_title(f"{found['devices']} x {found['device']}, kernels: {found['kernels']}")
plt.show()

# %%
for name, part in found["parts"].items():
    print(name)
    for figure_name, value in part.items():
        print(f"  {figure_name}: {value:,.4g}" if isinstance(value, float) else f"  {figure_name}: {value}")
for name, why in found["failed"].items():
    print(f"FAILED: {name}: {why}")
print(f"\nSend this file: {file.name} ({file.stat().st_size / 1024:.0f} KiB)")

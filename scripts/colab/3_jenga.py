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
# # Jenga: layers that forget
#
# Not all layers of a model remember alike. In Gemma 3 five layers out of six look at the last tokens only, through a
# *sliding window*; the sixth sees everything. An engine that knows one kind of memory must keep everything for all of
# them, and most of what it keeps is never read again.
#
# [Jenga](https://arxiv.org/abs/2503.18292) cuts one pool of memory into large pages, each of which any *group* of
# like layers may take and fill with its own, smaller blocks. Like the tower of the game, except that pulling out a
# block makes it steadier. This notebook builds a small model with Gemma 3's shape and measures the difference. Its
# weights are random, so it talks nonsense, but where its memory goes does not depend on what it says.

# %%
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = ""  # scripts/colab/sync.py writes the address of pyproject.toml here

if importlib.util.find_spec("jpaged") is None:
    on_tpu = "TPU_ACCELERATOR_TYPE" in os.environ or Path("/dev/accel0").exists()
    device = "tpu" if on_tpu else "cuda12" if shutil.which("nvidia-smi") else "cpu"
    wheel = os.environ.get("JPAGED_WHEEL")  # a wheel built from a checkout, instead of the repository
    if not wheel and not REPOSITORY:
        raise RuntimeError("jpaged is not installed: set the environment variable JPAGED_WHEEL to a wheel of it")
    source = Path(wheel).resolve().as_uri() if wheel else f"git+{REPOSITORY}"
    package = f"jpaged[{device},notebooks] @ {source}"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", package], check=True)

# %%
import tempfile
from dataclasses import replace
from pathlib import Path as Folder

import jax
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import HTML, display
from transformers import Gemma3TextConfig

from jpaged import LLM, MemoryReport, SamplingParams
from jpaged.benchmarks.memory_real import run
from jpaged.benchmarks.memory_real_models import MODELS
from jpaged.benchmarks.random_model import WINDOW, gemma3_config, save_random_gemma3

# %% tags=["parameters"]
PROMPTS = [40, 120, 200, 280]
OUTPUT_TOKENS = 96
REQUESTS = 16
POOL_MIB = 6

# %% [markdown]
# ## A model of two minds
#
# Twelve layers: ten local ones that see a window of 64 tokens, and two global ones.

# %%
fields = gemma3_config(hidden=256, mlp=512, layers=12, vocab=1024)
folder = tempfile.TemporaryDirectory()
save_random_gemma3(Folder(folder.name), fields)
device = jax.devices()[0]
old_gpu = device.platform == "gpu" and float(getattr(device, "compute_capability", "8.0")) < 8
llm = LLM(
    folder.name,
    dtype="float16" if old_gpu else "auto",
    max_model_len=512,
    max_num_seqs=8,
    max_num_batched_tokens=128,
    kv_cache_memory_bytes=16 << 20,
)
for group in llm.memory_report().groups:
    print(f"{group.name}: blocks of {group.block_bytes:,} bytes")
print(f"one large page: {llm.memory_report().page_bytes:,} bytes")

# %% [markdown]
# ## Watching it forget
#
# Four prompts of different lengths run together. After each token we ask the pool how much the groups hold. Beside it
# goes simple arithmetic: how much would the same tokens take with one page size, where every layer keeps everything (a
# block of every group for each 16 tokens of a sequence)? And how much of it can the next step read at all (in local
# layers, a window of each sequence)? What is held and cannot be read is waste.

# %%
rng = np.random.default_rng(0)
prompts = [{"prompt_token_ids": rng.integers(3, fields["vocab_size"], length).tolist()} for length in PROMPTS]
lengths = dict(enumerate(PROMPTS))  # of the sequences that run
held: list[float] = []
everything: list[float] = []
read: list[float] = []
memory = fullest = llm.memory_map()


def used_bytes(report: MemoryReport) -> int:
    """Return the bytes of the blocks that somebody owns."""
    return sum(group.used * group.block_bytes for group in report.groups)


def readable_bytes(report: MemoryReport) -> float:
    """Return the bytes of the tokens that the next step can read."""
    seen = {"full": sum(lengths.values()), "window": sum(min(length, WINDOW) for length in lengths.values())}
    return sum(seen[group.name] * group.block_bytes / 16 for group in report.groups)


params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
for delta in llm.stream(prompts, params):
    lengths[delta.prompt_index] += len(delta.token_ids)
    if delta.finish_reason:
        del lengths[delta.prompt_index]
    report, memory = llm.memory_report(), llm.memory_map()
    block_bytes = sum(group.block_bytes for group in report.groups)
    held.append(used_bytes(report) / 2**20)
    everything.append(sum(-(-length // 16) for length in lengths.values()) * block_bytes / 2**20)
    read.append(readable_bytes(report) / 2**20)
    if everything[-1] == max(everything):
        fullest = memory

figure, axes = plt.subplots(figsize=(8, 3.2))
axes.plot(everything, linestyle="--", color="grey", label="every layer keeps everything")
axes.plot(held, linewidth=2, label="layer groups")
axes.plot(read, linestyle=":", color="black", label="what can be read")
axes.set(xlabel="tokens generated, all four together", ylabel="MiB of KV", ylim=(0, None), title="What they hold")
axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
plt.tight_layout()
plt.show()
most = everything.index(max(everything))
print(f"At the fullest moment the groups hold {held[most]:.2f} MiB instead of {everything[most]:.2f}.")

# %% [markdown]
# The waste of both at that moment:

# %%
kinds = {"one page size": everything[most], "layer groups": held[most]}
waste = {name: size - read[most] for name, size in kinds.items()}
figure, axes = plt.subplots(figsize=(8, 2))
axes.barh(list(kinds), [read[most]] * 2, color="C0", label="can be read")
bars = axes.barh(list(kinds), list(waste.values()), left=read[most], color="lightgrey", hatch="//", label="waste")
axes.bar_label(bars, [f"{size:.2f} MiB, {size / kinds[name]:.0%}" for name, size in waste.items()], padding=3)
axes.margins(x=0.4)
axes.set(xlabel="MiB of KV", title="What is held, and what of it can be read")
axes.invert_yaxis()
axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
plt.tight_layout()
plt.show()
assert waste["layer groups"] < waste["one page size"], "a window's blocks are given back"

# %% [markdown]
# Here is the pool at that moment. Each cell is a large page, in the colour of the group that has taken it; the
# stripes inside are that group's blocks. The local layers do most of the computing and hold the smaller part of the
# memory.

# %%
display(HTML(fullest.to_html()))

# %% [markdown]
# ## What it buys
#
# Memory that is not held serves somebody else. Below, the same requests run twice in pools of the same size: once
# with one page size and every layer keeping every token, once with groups. Both write exactly the same tokens. The
# batch, the number of sequences that run at once while others wait, is what a server's throughput follows.

# %%
small = replace(MODELS[0], config=lambda: Gemma3TextConfig(**fields), pool_kib=POOL_MIB << 10)
runs = run(REQUESTS, seed=0, say=lambda line: None, models=[small])
figure, panels = plt.subplots(1, 2, figsize=(8, 3))
for axes, values, title in (
    (panels[0], [one.batch for one in runs], "sequences at once"),
    (panels[1], [float(one.steps) for one in runs], "steps for all requests"),
):
    bars = axes.bar(["one page size", "layer groups"], values, color=["grey", "C0"])
    axes.bar_label(bars, fmt="%.1f")
    axes.set_title(title)
plt.tight_layout()
plt.show()
assert runs[0].tokens == runs[1].tokens, "where memory lies changes nothing that is computed"
print(f"{runs[1].batch / runs[0].batch:.2f} times as many sequences at once, with windows of {WINDOW} tokens.")

# %% [markdown]
# The longer the texts are against the window, the more it buys. `jpaged bench memory` simulates Gemma-3-27B and
# others at their real sizes, and docs/memory.md has its figures beside the paper's.

# %%
llm.close()
folder.cleanup()

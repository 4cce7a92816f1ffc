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

# %%
import tempfile
from pathlib import Path as Folder

import jax
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import HTML, display
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import Gemma3TextConfig, PreTrainedTokenizerFast

import jpaged
from jpaged import LLM, MemoryReport, SamplingParams

WINDOW = 64

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
VOCABULARY = 1024


def save_random_model(path: Folder, window: int) -> None:
    """Write a Gemma 3 of random weights, the same ones for every window, and a vocabulary of numbered words."""
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=window,
        max_position_embeddings=1024,
    )
    config.save_pretrained(path)
    words = Tokenizer(WordLevel({f"word{number}": number for number in range(VOCABULARY)}, unk_token="word0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="word0").save_pretrained(path)
    matrices = {"self_attn.q_proj": (256, 256), "self_attn.k_proj": (128, 256), "self_attn.v_proj": (128, 256)}
    matrices |= {"self_attn.o_proj": (256, 256), "mlp.gate_proj": (512, 256), "mlp.up_proj": (512, 256)}
    matrices |= {"mlp.down_proj": (256, 512)}
    norms = {"self_attn.q_norm": 64, "self_attn.k_norm": 64, "input_layernorm": 256, "post_attention_layernorm": 256}
    norms |= {"pre_feedforward_layernorm": 256, "post_feedforward_layernorm": 256}
    draw = np.random.default_rng(0)
    tensors = {"model.embed_tokens.weight": draw.standard_normal((VOCABULARY, 256), np.float32) * np.float32(0.04)}
    tensors["model.norm.weight"] = np.zeros(256, np.float32)
    for layer in range(12):
        for name, shape in matrices.items():
            weight = draw.standard_normal(shape, np.float32) * np.float32(shape[1] ** -0.5)
            tensors[f"model.layers.{layer}.{name}.weight"] = weight
        for name, size in norms.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = np.zeros(size, np.float32)
    save_file(tensors, path / "model.safetensors")


folder = tempfile.TemporaryDirectory()
save_random_model(Folder(folder.name), WINDOW)
device = jax.devices()[0]
old_gpu = device.platform == "gpu" and float(getattr(device, "compute_capability", "8.0")) < 8
llm = LLM(
    folder.name,
    dtype="float16" if old_gpu else "auto",
    max_model_len=512,
    max_num_seqs=8,
    max_num_batched_tokens=128,
    block_size=16,
    kv_cache_memory_bytes=16 << 20,
)
groups = llm.memory_report().groups
for group in groups:
    print(f"{group.name}: blocks of {group.block_bytes:,} bytes")
print(f"one large page: {llm.memory_report().page_bytes:,} bytes")

# %% [markdown]
# ## Watching it forget
#
# Four prompts of different lengths run together. After each token we ask the pool how much the groups hold. Simple
# arithmetic gives two more numbers: how much would the same tokens take with one page size, where every layer keeps
# everything (a block of every group for each 16 tokens of a sequence)? And how much of it can the next step read at all
# (in local layers, a window of each sequence)? What is held and cannot be read is waste.

# %%
rng = np.random.default_rng(0)
prompts = [{"prompt_token_ids": rng.integers(3, VOCABULARY, length).tolist()} for length in PROMPTS]
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
# stripes inside are that group's blocks. Pale pages hold what has left the windows: no request owns them, they are
# cached, and free for a request that needs a page. The ten local layers hold about one and a half times what the two
# global ones hold, so a local layer holds a third of what a global one does:

# %%
display(HTML(fullest.to_html()))
layers = {"window": 10, "full": 2}
each = {}
for drawn, group in zip(fullest.groups, groups, strict=True):
    mib = drawn.used * group.block_bytes / 2**20
    each[group.name] = mib / layers[group.name]
    print(
        f"{layers[group.name]} {group.name} layers: {drawn.used} blocks, {mib:.2f} MiB, {each[group.name]:.2f} a layer"
    )
assert each["window"] < each["full"], "a local layer holds less than a global one"

# %% [markdown]
# ## What it buys
#
# Memory that is not held serves other requests. Below, the same requests run twice in pools of the same size: once by
# a model whose windows are as long as the longest text, so that every layer keeps every token, and once by the model
# above. The batch, the number of sequences that run at once while others wait, is what a server's throughput follows.


# %%
def serve(window: int) -> tuple[float, int]:
    """Return the mean batch and the number of steps in which a model with this window answers all requests."""
    draw = np.random.default_rng(1)
    asked = [{"prompt_token_ids": draw.integers(3, VOCABULARY, 256).tolist()} for _ in range(REQUESTS)]
    with tempfile.TemporaryDirectory() as path:
        save_random_model(Folder(path), window)
        engine = jpaged.LLM(
            path,
            dtype=str(np.dtype(llm.dtype)),
            max_model_len=448,
            max_num_seqs=16,
            max_num_batched_tokens=512,
            block_size=16,
            kv_cache_memory_bytes=POOL_MIB << 20,
        )
    before, batches = engine.stats().num_steps, []
    for _ in engine.stream(asked, SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)):
        stats = engine.stats()
        if stats.num_waiting:
            batches.append(stats.num_running)
    steps = engine.stats().num_steps - before
    engine.close()
    return sum(batches) / max(1, len(batches)), steps


runs = [serve(512), serve(WINDOW)]
figure, panels = plt.subplots(1, 2, figsize=(8, 3))
for axes, values, title in (
    (panels[0], [batch for batch, _ in runs], "mean sequences at once"),
    (panels[1], [float(steps) for _, steps in runs], "steps for all requests"),
):
    bars = axes.bar(["one page size", "layer groups"], values, color=["grey", "C0"])
    axes.bar_label(bars, fmt="%.3g" if max(values) < 100 else "%.0f")
    axes.margins(y=0.15)
    axes.set_title(title)
plt.tight_layout()
plt.show()
print(f"{runs[1][0] / max(1.0, runs[0][0]):.2f} times as many sequences at once, with windows of {WINDOW} tokens.")

# %% [markdown]
# The longer the texts are against the window, the more it buys. `python -m scripts.benchmarks
# hybrids`, in a checkout, simulates Gemma-3-27B and others at their real sizes; docs/memory.md has its figures and the
# paper's.

# %%
llm.close()
folder.cleanup()

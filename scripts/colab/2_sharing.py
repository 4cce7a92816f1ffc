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
# # What several answers share
#
# Ask a model for four drafts of one letter, and all four begin with the same question. Storing that question four
# times would be a waste. jpaged stores it once and counts its owners; only when a draft wants to *write* into a
# shared block does it get a copy of its own. Programmers know this as copy-on-write, and below we watch it happen,
# block by block.

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
import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

from jpaged import LLM, AsyncLLM, BeamSearchParams, MemoryMap, SamplingParams

# %% tags=["parameters"]
MAX_TOKENS = 40
BEAM_TOKENS = 24

# %%
device = jax.devices()[0]
old_gpu = device.platform == "gpu" and float(getattr(device, "compute_capability", "8.0")) < 8
llm = LLM(
    "smollm2-135m",
    dtype="float16" if old_gpu else "auto",
    max_model_len=512,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    block_size=16,
    kv_cache_memory_bytes=48 << 20,
)


# %% [markdown]
# A block holds 16 tokens. We draw each block that somebody owns as a box. A letter and a colour say which draft it
# belongs to; a grey box belongs to as many drafts as its number says.


# %%
def draw(memory: MemoryMap, title: str, axes: Any) -> None:
    """Draw the blocks with an owner: shared ones grey, with the number of their owners."""
    rows = memory.groups[0].blocks
    owned = rows[rows["owners"] > 0]
    owned = owned[(-owned["owners"]).argsort(kind="stable")]
    names = sorted(set(owned["sequence"][owned["owners"] == 1].tolist()))
    for place, block in enumerate(owned):
        x, y = place % 12, -(place // 12)
        shared = block["owners"] > 1
        number = names.index(block["sequence"]) if not shared else 0
        axes.add_patch(
            Rectangle((x, y), 0.9, 0.9, facecolor="lightgrey" if shared else f"C{number}", edgecolor="black")
        )
        axes.text(x + 0.45, y + 0.45, f"{block['owners']}" if shared else "ABCDEFGH"[number], ha="center", va="center")
    axes.set(xlim=(-0.2, 12.2), ylim=(-(max(0, len(owned) - 1) // 12) - 0.2, 1.1), title=title)
    axes.axis("off")


# %% [markdown]
# ## Four drafts of one prompt
#
# `n=4` asks for four samples. We stop to draw at three moments: when the prompt was just read, a little later, and
# near the end.

# %%
letter = (
    "Write a short and friendly letter to the neighbours. Tell them that the street will be closed on Saturday for the "
    "summer party, that there will be music until ten, and that everyone may bring a cake.\n\nDear neighbours,"
)
maps: list[MemoryMap] = []
drafts = ["", "", "", ""]
for delta in llm.stream(letter, SamplingParams(n=4, seed=7, max_tokens=MAX_TOKENS, ignore_eos=True)):
    drafts[delta.index] += delta.text
    maps.append(llm.memory_map())

figure, panels = plt.subplots(3, 1, figsize=(9, 6))
held = [one for one in maps if one.groups[0].used]
moments = {"just begun": held[0], "half way": held[len(held) // 2], "near the end": held[-4]}
for axes, (title, memory) in zip(panels, moments.items(), strict=True):
    draw(memory, f"{title}: {memory.groups[0].used} blocks", axes)
plt.tight_layout()
plt.show()

# %% [markdown]
# The prompt's full blocks stay grey to the end: four owners, one copy. The block that the prompt left half full was
# shared for a moment too, until the drafts began to differ and each took a copy to write in.

# %%
for number, draft in enumerate(drafts):
    print(f"--- draft {number}\n{draft.strip()[:160]}\n")

# %% [markdown]
# ## Beams
#
# Beam search keeps the most likely few texts at each step. Its beams do not only share the prompt. They are a family
# tree: the winner's children begin with everything the winner said, and a beam that loses gives its blocks back. We
# run it in the asynchronous engine and look at its memory while it works.


# %%
async def search(engine: AsyncLLM, prompt: str, width: int) -> tuple[Any, list[MemoryMap]]:
    """Return what the search found, and the memory at many moments of it."""
    params = BeamSearchParams(beam_width=width, max_tokens=BEAM_TOKENS, ignore_eos=True)
    task = asyncio.ensure_future(engine.beam_search(prompt, params, "beams"))
    seen = []
    while not task.done():
        seen.append(await engine.memory_map())
        await asyncio.sleep(0.01)
    return await task, seen


async def search_beams() -> tuple[Any, list[MemoryMap]]:
    """Lend the engine to an event loop for one search."""
    async with AsyncLLM.from_llm(llm) as engine:
        return await search(engine, letter, width=4)


def run(coroutine: Any) -> Any:
    """Run a coroutine in a thread of its own, since a notebook has an event loop already."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


found, seen = run(search_beams())
fullest = max(seen, key=lambda one: int(one.groups[0].blocks["owners"].sum()))
figure, axes = plt.subplots(figsize=(9, 2.5))
draw(fullest, f"four beams: {fullest.groups[0].used} blocks, {fullest.groups[0].shared} of them shared", axes)
plt.show()
for beam in found.outputs:
    print(f"{beam.cumulative_logprob:8.2f}  {beam.text[:90]!r}")

# %% [markdown]
# ## What it saves
#
# Count the blocks in every sequence's table, shared ones again and again: that is what an engine without sharing
# would need. `memory_report(peak=True)` remembers the busiest step.

# %%
savings = {}
for n in (1, 2, 4, 6):
    llm.reset_peak()
    llm.generate(letter, SamplingParams(n=n, seed=7, max_tokens=MAX_TOKENS, ignore_eos=True), use_tqdm=False)
    savings[f"n = {n}"] = llm.memory_report(peak=True).saving
for width in (2, 4):
    llm.reset_peak()
    llm.beam_search(letter, BeamSearchParams(width, BEAM_TOKENS, ignore_eos=True), use_tqdm=False)
    savings[f"{width} beams"] = llm.memory_report(peak=True).saving

figure, axes = plt.subplots(figsize=(8, 3))
bars = axes.bar(list(savings), [100 * saving for saving in savings.values()])
axes.bar_label(bars, fmt="%.0f %%")
axes.margins(y=0.15)
axes.set(ylabel="blocks saved, %", title="Blocks that sharing saves on this letter")
plt.show()

# %% [markdown]
# Here the prompt is long compared with the answers, so the savings are large. Over a realistic mix of lengths they are
# smaller; docs/sharing.md has those, next to the paper's.
#
# ## Strangers share too
#
# Two requests that know nothing of each other share as well, if their prompts begin alike, as prompts under one
# system message do. The first to come computes the beginning, and the second finds it.

# %%
system = "You are a patient librarian. You know every book in the house, and you recommend exactly one of them. " * 4
asked = ["I like ships.", "Something for a rainy day?", "My son is six.", "Poems, please."]
llm.reset_prefix_cache()
cold = llm.generate(f"{system}\nReader: {asked[0]}\nLibrarian:", SamplingParams(max_tokens=8, seed=1), use_tqdm=False)
warm = llm.generate(
    [f"{system}\nReader: {question}\nLibrarian:" for question in asked[1:]],
    SamplingParams(max_tokens=8, seed=1),
    use_tqdm=False,
)
figure, axes = plt.subplots(figsize=(8, 2.5))
for place, output in enumerate([*cold, *warm]):
    cached, total = output.num_cached_tokens, len(output.prompt_token_ids)
    axes.barh(place, cached, color="lightgrey", label="found in the cache" if place == 1 else None)
    axes.barh(place, total - cached, left=cached, color="C1", label="computed" if place == 1 else None)
axes.set(yticks=range(len(asked)), yticklabels=asked, xlabel="prompt tokens", title="One system message, four readers")
axes.invert_yaxis()
axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
plt.tight_layout()
plt.show()

# %% [markdown]
# So they lie in the pool, while all of those who came later are served at once. The grey boxes are the system message:
# three owners each, one copy. What a reader asked, and what the librarian says, is the reader's own.

# %%
strangers = [f"{system}\nReader: {question}\nLibrarian:" for question in asked[1:]]
maps = [llm.memory_map() for _ in llm.stream(strangers, SamplingParams(max_tokens=8, seed=1, ignore_eos=True))]
fullest = max(maps, key=lambda one: int(one.groups[0].blocks["owners"].sum()))
blocks = fullest.groups[0]
figure, axes = plt.subplots(figsize=(9, 2))
draw(fullest, f"three readers: {blocks.used} blocks, {blocks.shared} of them shared", axes)
plt.show()
print(f"Alone, each with its own copy, they would hold {int(blocks.blocks['owners'].sum())} blocks.")
assert blocks.shared >= 4, "strangers who begin alike share blocks"

# %% [markdown]
# Sharing never changes an answer: a sequence's draws depend on its text, its parameters and its seed, not on the other
# sequences. Private prompts stay private: `{"prompt": ..., "cache_salt": "tenant-1"}` shares with the same salt
# only.

# %%
assert llm.memory_report().used == 0, "every block was given back"
llm.close()

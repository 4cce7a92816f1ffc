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
# # First answers, and where they live in memory
#
# A language model that answers keeps notes: for each token it has seen, every layer stores a key and a value, so that
# the next token need not look at the whole text again. This *KV cache* soon outgrows the model itself. jpaged stores
# it the way an operating system stores programs, in small blocks that are handed out when needed and given back at
# once.
#
# This notebook asks a small model (SmolLM2, 135 million parameters, 94 MiB) a few questions and then draws its memory.
# It runs on a CPU, a T4 GPU or a TPU v5e-1: take what *Runtime → Change runtime type* offers. The cell below installs
# jpaged for what is there, and does nothing where it is installed.

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
# ## A model
#
# The first run compiles for the device, which takes half a minute or so; later ones find the compiled programs in a
# cache. A CPU computes in float32. A T4 has fast units for float16 but none for bfloat16, so there we ask for
# float16. All others choose for themselves.

# %%
import jax
from IPython.display import HTML, display

from jpaged import LLM, SamplingParams

# %% tags=["parameters"]
MAX_TOKENS = 48
STORY_TOKENS = 200
MAX_MODEL_LEN = 512
MAX_NUM_SEQS = 8

# %%
device = jax.devices()[0]
old_gpu = device.platform == "gpu" and float(getattr(device, "compute_capability", "8.0")) < 8
llm = LLM(
    "smollm2-135m",
    dtype="float16" if old_gpu else "auto",
    max_model_len=MAX_MODEL_LEN,
    max_num_seqs=MAX_NUM_SEQS,
    max_num_batched_tokens=64,
    block_size=16,  # what a GPU and a CPU have by default; a TPU has 128
    kv_cache_memory_bytes=48 << 20,  # small on purpose: 68 blocks in float32, so that the drawing can be read
)
print(f"{device.device_kind}: {llm.dtype}, {llm.memory_report().num_pages} blocks of 16 tokens")

# %% [markdown]
# ## Questions
#
# All questions go in at once, and are answered in one batch: each step computes one more token for every one of them.
# `temperature=0` takes the likeliest token each time, so you will read the same answers as everybody else.

# %%
questions = [
    "What is the capital of France, and which river runs through it?",
    "Explain in two sentences why the sky is blue.",
    "What does a compiler do?",
    "Write a haiku about the sea in winter.",
]
chats = [[{"role": "user", "content": question}] for question in questions]
outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS), use_tqdm=False)
for question, output in zip(questions, outputs, strict=True):
    print(f"{question}\n    {output.outputs[0].text.strip()}\n")

# %% [markdown]
# A small model is charming rather than wise. Any model of the families in the README goes in its place, such as
# `LLM("Qwen/Qwen3-0.6B")`.
#
# ## The memory, while it works
#
# `llm.stream` yields pieces of text as they come, and between two pieces we may look at the pool. Three stories are
# written at once; the map is of the moment at which they hold most. Each cell is a block of 16 tokens. The strong ones
# belong to the stories. Pale ones are *cached*: no request owns them, but they still hold the questions from above, in
# case somebody asks again.

# %%
openings = ["Once upon a time, in a harbour town,", "The last train had left, and", "Nobody knew why the clock"]
stories, maps = list(openings), []
for delta in llm.stream(openings, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)):
    stories[delta.prompt_index] += delta.text
    maps.append(llm.memory_map())
used = [one.groups[0].used for one in maps]
fullest = maps[used.index(max(used))]
print(*stories, sep="\n\n")
display(HTML(fullest.to_html()))

# %% [markdown]
# When the stream ends, its blocks are free again, that is: cached.

# %%
display(HTML(llm.memory_map().to_html()))

# %% [markdown]
# Memory is taken block by block, not for the longest answers there might be. Older engines reserved the dashed line at
# once: more blocks than this pool has, and most of them would have stayed empty. That is the whole point of
# PagedAttention ([Kwon et al., 2023](https://arxiv.org/abs/2309.06180)).

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(8, 3))
axes.step(range(len(used)), used, where="post", linewidth=2, label="blocks in use")
reserved = len(openings) * MAX_MODEL_LEN / 16
axes.axhline(reserved, linestyle="--", color="grey", label=f"reserved for {MAX_MODEL_LEN} tokens each")
axes.set(xlabel="tokens of all three", ylabel="blocks", ylim=(0, 1.3 * reserved), title="The memory of three stories")
axes.legend(loc="center")
plt.show()

# %% [markdown]
# ## The second time is cheaper
#
# A question that begins like an earlier one finds those blocks and does not compute them again.

# %%
rules = (
    "You are the keeper of a small lighthouse. You answer in one short sentence, and you never leave the island. " * 3
)
shared = [{"prompt": f"{rules}\nVisitor: {asked}\nKeeper:"} for asked in ("How old is it?", "Are you lonely?")]
for prompt in shared:
    (output,) = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=16), use_tqdm=False)
    print(f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens were found in the cache")

# %% [markdown]
# ## Stop whenever you like
#
# The next cell writes a long story. Press the stop button while it runs: the story's blocks are given back, and the
# engine goes on with whatever you ask it next.

# %% tags=["interrupt"]
try:
    for delta in llm.stream("A very long story:", SamplingParams(max_tokens=STORY_TOKENS, seed=1, ignore_eos=True)):
        print(delta.text, end="", flush=True)
except KeyboardInterrupt:
    print("\n(stopped)")

# %%
(output,) = llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
print(output.outputs[0].text)
assert llm.memory_report().used == 0, "every block was given back"

# %% [markdown]
# Next: [what several answers share](2_sharing.ipynb), [layers that forget](3_jenga.ipynb), and [a
# server](4_serving.ipynb).

# %%
llm.close()

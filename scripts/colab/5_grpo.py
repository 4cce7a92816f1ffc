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
# # A model that learns from its own answers
#
# Give a model a sum, let it answer several times, and tell it which of its answers were better than its average. That
# is GRPO ([Shao et al., 2024](https://arxiv.org/abs/2402.03300)), and it needs two programs that usually live in
# different frameworks: one that samples fast and one that differentiates. Here both are JAX, and both run the *same*
# modules on the *same* weights. This notebook teaches the demo model to add two digits, with some fifty lines and no
# framework.

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
import re
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

from jpaged import LLM, SamplingParams
from jpaged.training import logprobs

# %% tags=["parameters"]
STEPS = 15
PROMPTS = 4
SAMPLES = 8
RATE = 2e-5

# %% [markdown]
# ## The task
#
# A prompt shows a sum with its answer and asks for another. The right number is worth 1; a wrong one is worth
# less, the farther off it is; what is no number is worth nothing.

# %%
PROMPT_TOKENS, ANSWER_TOKENS = 10, 3


def ask(a: int, b: int) -> str:
    """Return the prompt for one sum."""
    return f"3+4=7\n{a}+{b}="


def worth(answer: str, wanted: int) -> float:
    """Return what an answer is worth."""
    found = re.match(r"\s*(\d{1,3})", answer)
    off = abs(int(found.group(1)) - wanted) if found else None
    return 0.0 if off is None else 1.0 if off == 0 else 0.5 / (1 + off)


# float32 on every device, a T4 too: a step of 2e-5 times a weight is lost in float16's ten bits of mantissa.
llm = LLM(
    "smollm2-135m",
    dtype="float32",
    max_model_len=64,
    max_num_seqs=PROMPTS * SAMPLES,
    max_num_batched_tokens=64,
    kv_cache_memory_bytes=128 << 20,
)

# %% [markdown]
# ## Roll out
#
# `n` answers of each prompt come from one batch, and the prompt lies in memory once (the notebook on sharing draws
# it). `logprobs=0` has the engine tell the log-probability of every token it drew.


# %%
def roll_out(sums: np.ndarray, seed: int) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray]:
    """Return answers, padded tokens, which of those are real, and the log-probabilities of what was drawn."""
    params = [
        SamplingParams(n=SAMPLES, max_tokens=ANSWER_TOKENS, seed=1000 * seed + i, logprobs=0, stop=["\n"])
        for i in range(len(sums))
    ]
    outputs = llm.generate([ask(a, b) for a, b in sums], params, use_tqdm=False)
    rows, width = len(sums) * SAMPLES, PROMPT_TOKENS + ANSWER_TOKENS
    tokens, real = np.zeros((rows, width), np.int32), np.zeros((rows, width), bool)
    drawn, texts = np.zeros((rows, ANSWER_TOKENS), np.float32), []
    for output in outputs:
        prompt = output.prompt_token_ids
        for answer in output.outputs:
            row, ids = len(texts), answer.token_ids
            span = slice(PROMPT_TOKENS - len(prompt), PROMPT_TOKENS + len(ids))
            tokens[row, span], real[row, span] = [*prompt, *ids], True
            drawn[row, : len(ids)] = [
                each[token].logprob for token, each in zip(ids, answer.logprobs or (), strict=True)
            ]
            texts.append(answer.text)
    return texts, tokens, real, drawn


# %% [markdown]
# ## Learn
#
# `jpaged.training.logprobs` computes the same log-probabilities as a function that `jax.grad` takes. The rest is
# GRPO's formula: answers better than the average of their prompt become likelier, the others less, and no step goes
# far. The new weights go back into the engine by `update_params`, without a copy through the host.

# %%
optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(RATE, b1=0.8))
state: Any = optimiser.init(llm.params)


def loss_of(params: Any, tokens: Any, real: Any, drawn: Any, advantages: Any) -> tuple[Any, Any]:
    """Return GRPO's loss, and the log-probabilities now."""
    counted = real[:, PROMPT_TOKENS:]
    now = logprobs(llm, params, tokens, real, start=PROMPT_TOKENS)
    ratio = jnp.exp(now - drawn)
    gain = jnp.minimum(ratio * advantages[:, None], jnp.clip(ratio, 0.8, 1.2) * advantages[:, None])
    return -(gain * counted).sum() / counted.sum(), now


@jax.jit
def improve(params: Any, state: Any, *batch: Any) -> tuple[Any, Any, Any]:
    """Return the weights after a step, the optimiser's state, and the log-probabilities before."""
    gradient, now = jax.grad(loss_of, has_aux=True)(params, *batch)
    updates, state = optimiser.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, now


rng = np.random.default_rng(0)
curve, apart = [], []
for step in range(STEPS):
    sums = rng.integers(1, 10, (PROMPTS, 2))
    texts, tokens, real, drawn = roll_out(sums, step)
    rewards = np.array([worth(text, int(sums[row // SAMPLES].sum())) for row, text in enumerate(texts)], np.float32)
    groups = rewards.reshape(PROMPTS, SAMPLES)
    advantages = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-4)
    params, state, now = improve(llm.params, state, tokens, real, drawn, advantages.reshape(-1))
    llm.update_params(params)
    counted = real[:, PROMPT_TOKENS:]
    curve.append(float(rewards.mean()))
    apart.append(float(np.abs(np.where(counted, np.asarray(now) - drawn, 0)).max()))
    print(f"step {step:2d}: reward {curve[-1]:.2f}, e.g. {sums[0][0]} + {sums[0][1]} ={texts[0]!r}", flush=True)

# %% [markdown]
# ## Did it?
#
# Fifteen steps are enough to see the curve rise. `scripts/rl/grpo_arithmetic.py` in the repository trains for longer,
# and counts the sums that the model gets right before and after.

# %%
figure, axes = plt.subplots(figsize=(8, 3))
smooth = [float(np.mean(curve[max(0, i - 4) : i + 1])) for i in range(len(curve))]
axes.plot(curve, alpha=0.35, color="C0", label="mean of a step")
axes.plot(smooth, color="C0", label="mean of five steps")
axes.set(xlabel="step", ylabel="reward", ylim=(0, 1.05), title="Learning to add")
axes.legend()
plt.show()

# %% [markdown]
# ## Who was asked, and who learned?
#
# The formula assumes that the one who learns gives each token the very probability with which it was drawn. With two
# frameworks that is never quite so, and papers have been written about the difference. Here it is rounding:

# %%
print(f"largest difference of a log-probability between sampler and trainer: {max(apart):.1e}")

# %% [markdown]
# With `LLM(..., deterministic=True)` and `logprobs(..., deterministic=True)` it is exactly 0, at a price that
# docs/rl.md tells.

# %%
llm.close()

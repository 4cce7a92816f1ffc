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
# # A model that learns to read
#
# A vision model is a tower that turns a picture into vectors, and a language model that reads them like words. This
# notebook makes a small one from nothing, a [SmolVLM](https://arxiv.org/abs/2504.05299) of two million parameters,
# and teaches it to read numbers. PyTorch trains it; jpaged opens the folder that comes out of that, and answers
# questions about pictures of numbers that the model never saw.

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
# The training is not part of the installed package: it comes with a checkout of the repository, which `SOURCE` is or is
# the address of. It needs PyTorch, which Colab and Kaggle have, and Pillow.

# %%
checkout = Path("jpaged-checkout" if "://" in SOURCE else SOURCE).resolve()
if not (checkout / "scripts" / "reader.py").exists():
    if "://" not in SOURCE:
        raise RuntimeError(f"SOURCE={SOURCE!r} is no checkout: write its folder, or an address, into the first cell")
    subprocess.run(["git", "clone", "--quiet", "--depth=1", SOURCE, str(checkout)], check=True)
missing = [package for name, package in (("torch", "torch"), ("PIL", "pillow")) if not importlib.util.find_spec(name)]
if missing:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *missing], check=True)
sys.path.insert(0, str(checkout))

# %%
import matplotlib.pyplot as plt
import numpy as np
from transformers.utils import logging

from scripts import reader

logging.disable_progress_bar()

# %% tags=["parameters"]
STEPS = 4000
MINUTES = 3
NUMBERS = 200

# %% [markdown]
# ## What it is shown
#
# Numbers of up to four digits in Pillow's own font, in several sizes, places and greys. A thousand numbers are kept
# back: no picture of the training shows one of them. A picture costs 16 tokens.

# %%
rng = np.random.default_rng(0)
figure, axes = plt.subplots(2, 5, figsize=(8, 3.4), layout="constrained")
for place, number in zip(axes.flat, reader.learned(10, rng), strict=True):
    place.imshow(reader.draw(number, rng))
    place.set_title(str(number))
    place.axis("off")
plt.show()

# %% [markdown]
# ## Train
#
# Plain pictures come first, dark on light and in the middle, and the others by degrees, as the loss falls: from the
# start the latter would teach such a small tower nothing for long. Three minutes on two cores show how it begins to
# read. The whole training takes twenty: `MINUTES = 20`, or `python -m scripts.reader` in a checkout.

# %%
model = reader.make()
print(f"{model.model.num_parameters():,} parameters")
losses = []
for loss in reader.train(model, STEPS, MINUTES):
    losses.append(loss)
    if len(losses) % 250 == 0:
        print(f"step {len(losses)}: loss {np.mean(losses[-250:]):.3f}", flush=True)
model.save("reader")

# %%
figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
axes.plot(losses)
axes.set(xlabel="step", ylabel="loss", title="Learning to read")
plt.show()

# %% [markdown]
# ## Ask
#
# `LLM` opens the folder like any other model of Hugging Face's, and `chat` takes pictures in messages.

# %%
llm = reader.opened("reader")
shown = reader.unseen()[:10]
pictures = [reader.draw(number, rng) for number in shown]
answers = reader.read(llm, pictures)
figure, axes = plt.subplots(2, 5, figsize=(8, 3.4), layout="constrained")
for place, picture, number, answer in zip(axes.flat, pictures, shown, answers, strict=True):
    place.imshow(picture)
    place.set_title(
        answer if answer.isdecimal() else "no number", color="black" if answer == str(number) else "tab:red"
    )
    place.axis("off")
plt.show()

# %% [markdown]
# ## Does it look?
#
# Each number that was kept back is asked for with its own picture, then with that of another number.

# %%
own, swapped = reader.scores(llm, NUMBERS)
print(f"with their own pictures {own.numbers:.0%} of {NUMBERS} numbers are read, and {own.digits:.0%} of the digits")
print(f"with each other's pictures {swapped.numbers:.0%} and {swapped.digits:.0%}, as by chance")

# %%
llm.close()

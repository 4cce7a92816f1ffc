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
# # A server in a notebook
#
# `jpaged serve` speaks OpenAI's protocol: programs that were written for that API need another address and nothing
# else. Here we start one from the notebook, talk to it with the `openai` package, and let eight visitors in at
# once.

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
import json
import socket
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from urllib.error import URLError

import matplotlib.pyplot as plt
from openai import OpenAI

# %% tags=["parameters"]
MAX_TOKENS = 40
VISITORS = 8

# %% [markdown]
# ## Start it
#
# The server is a process of its own, which listens on this machine only. It loads the model and compiles its
# programs, then says at `/health` that it is ready.

# %%
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
url = f"http://127.0.0.1:{port}"
log = tempfile.TemporaryFile("w+")
command = [sys.executable, "-m", "jpaged.cli.main", "serve", "smollm2-135m", "--port", str(port), "--no-warmup"]
sizes = ["--max-model-len", "512", "--max-num-seqs", "8", "--max-num-batched-tokens", "64"]
gpus = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout if shutil.which("nvidia-smi") else ""
dtype = ["--dtype", "float16"] if "T4" in gpus else []
server = subprocess.Popen([*command, *sizes, *dtype], stdout=log, stderr=subprocess.STDOUT)


def answers() -> bool:
    """Tell whether the server is ready."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except (URLError, OSError):
        return False


began = time.monotonic()
while not answers():
    if server.poll() is not None or time.monotonic() - began > 280:
        server.kill()
        log.seek(0)
        raise RuntimeError("the server did not start:\n" + log.read()[-2000:])
    time.sleep(0.5)
print(f"ready after {time.monotonic() - began:.0f} s at {url}/v1")

# %% [markdown]
# ## Ask
#
# The client wants a key; a server on one's own machine does not look at it.

# %%
client = OpenAI(base_url=f"{url}/v1", api_key="not needed here")
answer = client.chat.completions.create(
    model="smollm2-135m",
    messages=[{"role": "user", "content": "Name three rivers of Europe."}],
    max_tokens=MAX_TOKENS,
    temperature=0,
)
print(answer.choices[0].message.content)
print(answer.usage)

# %% [markdown]
# Word by word, as chat windows show it:

# %%
for event in client.completions.create(
    model="smollm2-135m",
    prompt="The lighthouse keeper opened the door and",
    max_tokens=MAX_TOKENS,
    temperature=0,
    stream=True,
):
    print(event.choices[0].text, end="", flush=True)

# %% [markdown]
# And in a shape of your own. The model cannot write anything that breaks the schema, because the tokens that would
# are masked before each draw. Whether what it says is *true* is another matter, with 135 million parameters.

# %%
schema = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "population": {"type": "integer"}},
    "required": ["city", "population"],
    "additionalProperties": False,
}
shaped = client.chat.completions.create(
    model="smollm2-135m",
    messages=[{"role": "user", "content": "Name a large city and its population, as JSON."}],
    response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
    max_tokens=64,
    temperature=0,
)
print(json.loads(shaped.choices[0].message.content or ""))

# %% [markdown]
# ## Eight visitors at once
#
# Each visitor streams an answer. Every dot is a token that arrived. The server does not answer one after the other:
# in each step, everybody who is there gets a token.


# %%
def visit(number: int) -> list[float]:
    """Return when each piece of one visitor's answer came, in seconds since the doors opened."""
    stream = client.completions.create(
        model="smollm2-135m",
        prompt=f"Visitor number {number} says:",
        max_tokens=MAX_TOKENS,
        seed=number,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    return [time.monotonic() - opened for event in stream if event.choices]


opened = time.monotonic()
with ThreadPoolExecutor(VISITORS) as pool:
    arrivals = list(pool.map(visit, range(VISITORS)))
figure, axes = plt.subplots(figsize=(8, 3))
for number, times in enumerate(arrivals):
    axes.plot(times, [number] * len(times), ".", markersize=4)
axes.set(xlabel="seconds", ylabel="visitor", title="Tokens as they arrive")
plt.show()
print(f"{sum(map(len, arrivals)) / max(map(max, arrivals)):.0f} tokens/s for all of them together")

# %% [markdown]
# ## Look inside
#
# `/memory` draws the pool live, block by block, and `/metrics` has the figures that Prometheus collects. On Colab the
# page opens below; elsewhere, open the address that is printed.

# %%
if importlib.util.find_spec("google.colab") if importlib.util.find_spec("google") else None:
    from google.colab import output  # type: ignore[import-not-found]

    output.serve_kernel_port_as_iframe(port, path="/memory", height=500)
else:
    print(f"{url}/memory")
with urllib.request.urlopen(f"{url}/metrics", timeout=10) as page:
    metrics = page.read().decode().splitlines()
print(
    *[line for line in metrics if line.startswith(("jpaged:prompt_tokens", "jpaged:generation_tokens"))],
    sep="\n",
)

# %% [markdown]
# ## Close the doors
#
# On SIGTERM the server accepts no new request, finishes those that run, and ends.

# %%
server.terminate()
print("the server ended with code", server.wait(timeout=60))
log.close()

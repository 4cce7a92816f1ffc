"""Measures what fetching several ranges at once brings to the load of a model at a URL."""

from __future__ import annotations

import json
import tempfile
import time
import urllib.request
from pathlib import Path
from statistics import median
from unittest.mock import patch

import numpy as np
from safetensors.numpy import save_file

from jpaged.loading import load_model, remote_file
from scripts.benchmarks.range_server import RangeServer, serving
from scripts.cases import Rows

_HIDDEN, _INNER, _VOCABULARY, _HEADS, _KV_HEADS, _HEAD = 512, 1536, 8192, 8, 2, 64


def remote(layers: int = 8, latency: float = 0.05, bandwidth: float = 100.0, rounds: int = 3) -> Rows:
    """Seconds to load a random Llama from a server of this machine, by ranges and in other ways, which take turns.

    The server waits --latency seconds before each answer, and gives a connection --bandwidth MB/s.
    """
    with tempfile.TemporaryDirectory() as root:
        served = Path(root) / "served"
        size = _write(served / "model", layers)
        with serving(served) as server:
            server.latency, server.bandwidth = latency, bandwidth * 1e6
            ways = {
                "on disk": lambda: load_model(served / "model"),
                "whole file, then load": lambda: _whole(server, Path(root) / "copy"),
                "one range at a time": lambda: _one_at_a_time(server, root),
                "ranges at once": lambda: load_model(f"{server.url}/model", download_dir=root),
            }
            load_model(served / "model")  # what is imported and compiled is no part of a way
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(rounds):
                for way, load in ways.items():
                    began = time.perf_counter()
                    load()
                    seconds[way].append(time.perf_counter() - began)
    for way, found in seconds.items():
        yield {"load": way, "MB": round(size / 1e6), "rounds": rounds, "seconds": round(median(found), 2)}


def _whole(server: RangeServer, copy: Path) -> None:
    copy.mkdir(exist_ok=True)
    for file in (server.folder / "model").iterdir():
        urllib.request.urlretrieve(f"{server.url}/model/{file.name}", copy / file.name)
    load_model(copy)


def _one_at_a_time(server: RangeServer, root: str) -> None:
    with patch.object(remote_file, "_AT_ONCE", 1), patch.object(remote_file, "AHEAD", 0):
        load_model(f"{server.url}/model", download_dir=root)


def _write(folder: Path, layers: int) -> int:
    """Write a random Llama; returns the bytes of its weights."""
    folder.mkdir(parents=True)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD,
        "vocab_size": _VOCABULARY,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (_VOCABULARY, _HIDDEN),
        "lm_head.weight": (_VOCABULARY, _HIDDEN),
        "model.norm.weight": (_HIDDEN,),
    }
    for layer in range(layers):
        for name, shape in {
            "input_layernorm": (_HIDDEN,),
            "post_attention_layernorm": (_HIDDEN,),
            "self_attn.q_proj": (_HEADS * _HEAD, _HIDDEN),
            "self_attn.k_proj": (_KV_HEADS * _HEAD, _HIDDEN),
            "self_attn.v_proj": (_KV_HEADS * _HEAD, _HIDDEN),
            "self_attn.o_proj": (_HIDDEN, _HEADS * _HEAD),
            "mlp.gate_proj": (_INNER, _HIDDEN),
            "mlp.up_proj": (_INNER, _HIDDEN),
            "mlp.down_proj": (_HIDDEN, _INNER),
        }.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    rng = np.random.default_rng(0)
    save_file(
        {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}, folder / "model.safetensors"
    )
    return (folder / "model.safetensors").stat().st_size

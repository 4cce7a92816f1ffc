"""Options of the command line reach the engine, and what it refuses is told."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from jpaged.cli import app
from jpaged.config import EngineConfig

GENERATING = [["generate", "Hello"], ["chat"], ["bench", "throughput"]]


@pytest.mark.parametrize("command", GENERATING)
def test_the_order_of_eviction_is_an_option_of_every_command_that_generates(command, monkeypatch):
    def build(model, **settings):
        raise ValueError(f"built with {EngineConfig(model=model, **settings).prefix_eviction}")

    monkeypatch.setattr("jpaged.llm.LLM", build)
    for options, said in (
        ([], "built with aligned"),
        (["--prefix-eviction", "predicted"], "built with predicted"),
        (["--prefix-eviction", "mru"], "prefix_eviction='mru' is not one of lru, aligned,"),
    ):
        result = CliRunner().invoke(app, [*command, "--model", "some/model", *options])
        assert result.exit_code == 2 and said in " ".join(result.output.replace("\u2502", "").split())


@pytest.mark.parametrize("command", GENERATING)
def test_how_weights_and_kv_lie_on_devices_is_an_option_of_every_command_that_generates(command, monkeypatch):
    asked = {
        "quantization": "int8",
        "kv_cache_dtype": "fp8",
        "tensor_parallel_size": 4,
        "enable_expert_parallel": True,
    }

    def build(model, **settings):
        raise ValueError("built as asked" if settings.items() >= asked.items() else f"built with {settings}")

    monkeypatch.setattr("jpaged.llm.LLM", build)
    options = ["--quantization", "int8", "--kv-cache-dtype", "fp8", "--tensor-parallel-size", "4"]
    result = CliRunner().invoke(app, [*command, "--model", "some/model", *options, "--enable-expert-parallel"])
    assert result.exit_code == 2 and "built as asked" in result.output


def test_help_is_told_without_jax():
    code = "import sys, jpaged.config, jpaged.cli; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

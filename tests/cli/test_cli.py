"""Options of the command line reach the engine, and what it refuses is told."""

import subprocess
import sys
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import jpaged
from jpaged.cli.generate import read_prompts
from jpaged.cli.main import OncePerCause, app
from jpaged.config import EngineConfig
from jpaged.errors import GenerationInterrupted

CONTROL = SimpleNamespace(compilation_notes=nullcontext)
GENERATING = [["generate", "Hello"], ["chat"], ["bench", "throughput"]]


@pytest.mark.parametrize("command", GENERATING)
def test_the_order_of_eviction_is_an_option_of_every_command_that_generates(command, monkeypatch):
    def build(model, **settings):
        raise ValueError(f"built with {EngineConfig(model=model, **settings).prefix_eviction}")

    monkeypatch.setattr("jpaged.llm.LLM", build)
    for options, said in (
        ([], "built with aligned"),
        (["--prefix-eviction", "predicted"], "built with predicted"),
        (["--prefix-eviction", "mru"], "--prefix-eviction 'mru' is not one of lru, aligned,"),
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


@pytest.mark.parametrize("command", [["generate", "Hello"], ["chat"]])
def test_a_folder_without_a_tokenizer_is_refused_before_its_weights_are_read(command, tmp_path, monkeypatch):
    def build(model, **settings):
        raise ValueError("built")

    monkeypatch.setattr("jpaged.llm.LLM", build)
    (tmp_path / "config.json").write_text("{}")
    result = CliRunner().invoke(app, [*command, "--model", str(tmp_path)])
    assert result.exit_code == 2
    assert "has no tokenizer, which text needs" in " ".join(result.output.replace("\u2502", "").split())
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "built" in CliRunner().invoke(app, [*command, "--model", str(tmp_path)]).output


def test_help_is_told_without_jax():
    code = "import sys, jpaged.config, jpaged.cli.main; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_file_of_prompts_that_is_no_text_is_named(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for file, said in ((tmp_path, "directory."), (tmp_path / "bytes", "UTF-8:")):
        result = CliRunner().invoke(app, ["generate", "--file", str(file)])
        assert result.exit_code == 2 and said in result.output.replace("\u2502", "").split()


def test_only_a_line_feed_ends_a_prompt_of_a_file(tmp_path):
    (tmp_path / "prompts").write_bytes("a\u2028b\x0cc\r\n\r\n\nd".encode())
    assert read_prompts(tmp_path / "prompts") == ["a\u2028b\x0cc", "d"]


def test_the_version_is_the_packages():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"jpaged {jpaged.__version__}\n")


@pytest.mark.parametrize("command", ["memory", "serving-sim", "speculative"])
def test_a_benchmark_that_left_the_package_says_where_it_went(command):
    result = CliRunner().invoke(app, ["bench", command, "--num-requests", "3"])
    assert result.exit_code == 2 and f"jpaged bench {command} is no command" in result.output
    assert "python -m scripts.benchmarks" in result.output


@pytest.mark.parametrize("command", [[], ["generate"], ["serve"], ["bench"], ["bench", "throughput"]])
def test_h_is_help(command):
    short, long = (CliRunner().invoke(app, [*command, flag]) for flag in ("-h", "--help"))
    assert short.exit_code == 0 and short.output == long.output and "Usage: " in long.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "hi", "--top-p", "3"], "--top-p 3"),
        (["generate", "hi", "--max-tokens", "x"], "--max-tokens"),
        (["generate", "hi", "--top-pp", "1"], "--top-p"),
        (["generate"], "give prompts, or --file"),
        (["chat", "--temperature", "-1"], "--temperature"),
        (["plan", "--model", "smollm2-135m", "--device", "v5e8"], "did you mean v5e-8?"),
        (["serve", "m", "--tool-call-parser", "hermes"], "--tool-call-parser: give --tool-parser"),
        (["serve", "m", "--trust-remote-code"], "--trust-remote-code: no code of a model's repository is run"),
        (["serve", "m", "--num-gpu-blocks-override", "9"], "kv_cache_memory_bytes or memory_utilization sets"),
        (["serve", "m", "--watermark", "0.1"], "watermark is a setting of LLM and AsyncLLM"),
        (["serve", "m", "--gpu-memory-utilization", "2"], "--memory-utilization 2.0 is outside"),
        (["serve", "m", "--swap-space", "1"], "--swap-space 1.0 needs --preemption-mode"),
        (["compile", "m", "--device"], "'--device' requires an argument"),
        (["run-batch", "-i", "in.jsonl", "-o", "out.jsonl"], "-i: run-batch takes IN and OUT without flags"),
        (["serv"], "Did you mean 'serve'?"),
        (["bench", "serv"], "Did you mean 'serve'?"),
    ],
)
def test_an_error_is_one_message_that_names_the_flag(arguments, said):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and said in result.output
    assert result.output.startswith("Error: ") and "Usage" not in result.output and len(result.output) < 1000
    assert "Traceback" not in result.output


def test_a_prompt_that_is_refused_is_not_printed_whole(monkeypatch):
    refused = SimpleNamespace(prompt="x" * 5000 + "\nend", error="the prompt has 5000 tokens", outputs=[])
    monkeypatch.setattr("jpaged.llm.LLM", lambda *_, **__: SimpleNamespace(generate=lambda *_, **__: [refused]))
    result = CliRunner().invoke(app, ["generate", "hi"])
    assert result.exit_code == 1 and "x" * 80 + "..." in result.output and "x" * 81 not in result.output
    assert "refused: the prompt has 5000 tokens" in result.output


def test_an_error_quotes_the_beginning_of_a_long_value(monkeypatch):
    def refuse(*_, **__):
        raise ValueError(f"model={'m' * 5000!r} does not exist")

    monkeypatch.setattr("jpaged.llm.LLM", refuse)
    result = CliRunner().invoke(app, ["generate", "hi"])
    assert result.output.splitlines()[-1] == f"Error: --model '{'m' * 56}...{'m' * 19}' does not exist"


def test_a_command_without_arguments_prints_its_help():
    for command in ([], ["bench"]):
        assert CliRunner().invoke(app, command).output.lstrip().startswith("Usage: ")


def test_an_error_that_names_a_setting_alone_names_the_flag_alone(monkeypatch):
    def refuse(*_, **__):
        raise ValueError("download_dir= chooses the folder, block_size=3 is odd and language_model_only=True is so")

    monkeypatch.setattr("jpaged.llm.LLM", refuse)
    said = CliRunner().invoke(app, ["generate", "hi"]).output.splitlines()[-1]
    assert said == "Error: --download-dir chooses the folder, --block-size 3 is odd and --language-model-only is so"


def test_a_stream_of_one_prompt_is_refused_without_its_number(monkeypatch):
    def stream(*_):
        raise ValueError("prompt 0: the prompt has 5000 tokens")

    monkeypatch.setattr("jpaged.llm.LLM", lambda *_, **__: SimpleNamespace(stream=stream, control=CONTROL))
    result = CliRunner().invoke(app, ["generate", "hi", "--stream"])
    assert (
        result.output.splitlines()[-1].endswith("Error: the prompt has 5000 tokens") and "prompt 0" not in result.output
    )


@pytest.mark.parametrize("flags", [[], ["--stream"]])
def test_ctrl_c_keeps_the_text_so_far(monkeypatch, flags):
    def stream(*_):
        yield SimpleNamespace(text=" as far")
        raise KeyboardInterrupt

    def generate(*_, **__):
        done = SimpleNamespace(prompt="hi", error=None, outputs=[SimpleNamespace(text=" as far")])
        raise GenerationInterrupted([done])

    llm = SimpleNamespace(stream=stream, generate=generate, control=CONTROL)
    monkeypatch.setattr("jpaged.llm.LLM", lambda *_, **__: llm)
    result = CliRunner().invoke(app, ["generate", "hi", *flags])
    assert result.exit_code == 130 and result.stdout.endswith("hi as far\n")
    assert result.stderr.splitlines()[-1] == "stopped: this is the text so far"


def test_a_warning_is_a_line_without_its_source(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # put back afterwards
    CliRunner().invoke(app, ["plan", "--help"])
    assert warnings.formatwarning("the pool is small", UserWarning, "builder.py", 417) == "warning: the pool is small\n"


def test_a_warning_of_a_library_is_shown_once_a_cause_and_each_of_jpaged():
    shown = []
    show = OncePerCause(lambda *arguments: shown.append(str(arguments[0])))
    for number in range(12):
        show(UserWarning(f"program {number}: no space left"), UserWarning, "/lib/jax/compiler.py", 833)
        show(UserWarning(f"adapter {number} has no weights"), UserWarning, jpaged.__file__, 7)
    show(UserWarning("another"), UserWarning, "/lib/jax/compiler.py", 782)
    assert [text for text in shown if "jax" in text or "program" in text] == ["program 0: no space left"]
    assert len(shown) == 1 + 12 + 1

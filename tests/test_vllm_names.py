"""Each name that scripts/vllm_names.py finds in vLLM works here, or says what to use."""

from __future__ import annotations

import argparse
import inspect
import json
import subprocess
import sys
from dataclasses import asdict, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import ValidationError
from typer.main import get_command
from typer.testing import CliRunner

import jpaged
from jpaged import AsyncLLM, BeamSearchParams, LoRARequest, PoolingParams, SamplingParams, outputs, vllm_names
from jpaged.cli.main import app
from jpaged.config import EngineConfig
from jpaged.engine_args import EngineArgs
from jpaged.metrics import Counter, Gauge, Histogram
from jpaged.server.anthropic import endpoints as messages
from jpaged.server.bodies import Body
from jpaged.server.endpoints import pages, status, tokens
from jpaged.server.openai.bodies.chat import ChatRequest
from jpaged.server.openai.bodies.prompts import CompletionRequest, DetokenizeRequest, TokenizeRequest
from jpaged.server.openai.bodies.responses import ResponsesRequest
from jpaged.server.openai.bodies.vectors import ClassifyRequest, EmbeddingRequest, RerankRequest, ScoreRequest
from jpaged.server.openai.endpoints import chat, completions, responses, vectors
from jpaged.vllm_compat import engine_settings, missing_flag

NAMES = json.loads((Path(__file__).parent / "vllm_names.json").read_text())
IMPORTS = [(module, name) for module, names in NAMES["imports"].items() for name in (*names, None)]
BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/classify": ClassifyRequest,
    "/score": ScoreRequest,
    "/rerank": RerankRequest,
    "/tokenize": TokenizeRequest,
    "/tokenize (messages)": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
METRICS = outputs.RequestMetrics(1.0)
HELD: dict[str, Any] = {
    "LLM": jpaged.LLM.__new__(jpaged.LLM),
    "AsyncLLM": AsyncLLM.__new__(AsyncLLM),
    "EngineArgs": EngineArgs("m"),
    "AsyncEngineArgs": EngineArgs("m"),
    "SamplingParams": SamplingParams(),
    "StructuredOutputsParams": jpaged.StructuredOutputsParams(regex="a"),
    "BeamSearchParams": BeamSearchParams(2, 4),
    "RequestOutputKind": jpaged.RequestOutputKind,
    "PoolingParams": PoolingParams(),
    "LoRARequest": LoRARequest("a", 3, "/a"),
    "RequestOutput": outputs.RequestOutput(1, "a", [1]),
    "CompletionOutput": outputs.CompletionOutput(0, "a", [1], None, None),
    "PoolingRequestOutput": outputs.PoolingRequestOutput(1, outputs.ScoringOutput(1.0), [1]),
    "EmbeddingOutput": outputs.EmbeddingOutput([1.0]),
    "ClassificationOutput": outputs.ClassificationOutput([1.0], [1.0]),
    "ScoringOutput": outputs.ScoringOutput(1.0),
    "BeamSearchOutput": outputs.RequestOutput(1, "a", [1]),
    "BeamSearchSequence": outputs.BeamSearchSequence([1], "a", 0.0),
    "Logprob": outputs.Logprob(0.0, 1),
    "RequestStateStats": METRICS,
    "Counter": Counter("a", 1.0),
    "Gauge": Gauge("a", 1.0),
    "Histogram": Histogram("a", 1, 1.0, {}),
}
"""An object of each class of ours that has the place of one of vLLM's."""
ABSENT = ("Vector", "TextPrompt", "TokensPrompt")  # cannot be imported; keys of a mapping
FROM_ELSEWHERE = {"adapters", "config", "control", "model_config", "input_processor", "output_processor", "tokenizer"}
"""What the constructors of `LLM` and `AsyncLLM` store."""


def ours(module: str) -> str:
    return "jpaged" + module.removeprefix("vllm")


def says_what_to_use(message: object) -> bool:
    return any(
        reason in str(message) for table in (vllm_names.IMPORTS, vllm_names.MODULES) for reason in table.values()
    )


@pytest.mark.parametrize(("module", "name"), IMPORTS, ids=lambda value: str(value))
def test_imports_work_or_say_what_to_use(module, name):
    try:
        found = import_module(ours(module))
        if name is not None:
            exec(f"from {ours(module)} import {name}", {})
    except ImportError as error:
        assert says_what_to_use(error), error
    else:
        assert name is None or getattr(found, name) is not None


@pytest.mark.parametrize("module", [*vllm_names.TAKEN, *vllm_names.MODULES])
def test_rows_of_modules_are_what_an_import_meets(module):
    names = vllm_names.TAKEN.get(module, {})
    found = f"jpaged.{module}".removesuffix(".")
    for name, place in names.items():
        home, its_name = place.split(":")
        assert getattr(import_module(found), name) is getattr(import_module(home), its_name)
    for name in ("Nonesuch", "SomeClass"):
        with pytest.raises(ImportError):
            exec(f"from {found} import {name}", {})
    if module in vllm_names.MODULES:
        with pytest.raises(ImportError) as error:
            exec(f"from {found}.within import something", {})
        assert says_what_to_use(error.value)


def test_other_modules_and_names_are_unknown_as_ever():
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'jpaged\.nonesuch'$"):
        import_module("jpaged.nonesuch")
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'jpaged\.engine\.nonesuch'$"):
        import_module("jpaged.engine.nonesuch")
    for module in ("jpaged", "jpaged.config", "jpaged.inputs", "jpaged.outputs", "jpaged.sampling_params"):
        assert not hasattr(import_module(module), "nonesuch")


def test_an_import_of_jpaged_alone_reads_no_table():
    code = "import jpaged, sys; print([name for name in sys.modules if name.startswith('jpaged.vllm')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("name", [name for name in NAMES["members"] if name not in ABSENT])
def test_members_work_or_say_what_to_use(name):
    held = HELD[name]
    owner = type(held).__name__
    reasons = vllm_names.MEMBERS.get(owner, {}) | vllm_names.PARAMETERS.get(owner, {})
    for member in NAMES["members"][name]:
        if member in FROM_ELSEWHERE and owner in ("LLM", "AsyncLLM"):
            continue
        if isinstance(inspect.getattr_static(held, member, None), property) and owner in ("LLM", "AsyncLLM"):
            continue
        if member in reasons:
            with pytest.raises(AttributeError) as error:
                getattr(held, member)
            assert str(error.value).endswith(reasons[member])
            assert not hasattr(held, member) and not hasattr(type(held), member)
        else:
            getattr(held, member)


def test_keys_of_prompts_are_known_or_say_what_to_use():
    for kind in (jpaged.TextPrompt, jpaged.TokensPrompt):
        for key in NAMES["members"][kind.__name__]:
            assert (key in kind.__annotations__) != (key in vllm_names.PROMPT_KEYS), key


@pytest.mark.parametrize(
    ("cls", "given"),
    [
        (SamplingParams, {}),
        (jpaged.StructuredOutputsParams, {"regex": "a"}),
        (BeamSearchParams, {"beam_width": 2, "max_tokens": 2}),
        (PoolingParams, {}),
        (LoRARequest, {"lora_name": "a"}),
    ],
)
def test_parameters_of_classes_say_what_to_use(cls, given):
    for name, reason in vllm_names.PARAMETERS[cls.__name__].items():
        with pytest.raises(TypeError) as error:
            cls(**given, **{name: 1})
        assert str(error.value).endswith(reason)
        assert name not in {field.name for field in fields(cls)}


@pytest.mark.parametrize("method", NAMES["arguments"])
def test_arguments_of_methods_are_taken_or_say_what_to_use(method):
    owner, name = method.split(".")
    if name in vllm_names.MEMBERS[owner]:
        return
    call = getattr(HELD[owner], name)
    taken = {*inspect.signature(getattr(type(HELD[owner]), name)).parameters, "data_1", "data_2"}
    for argument in NAMES["arguments"][method]:
        assert (argument in taken) != (argument in vllm_names.ARGUMENTS.get(method, {})), argument
    for argument, reason in vllm_names.ARGUMENTS.get(method, {}).items():
        with pytest.raises(TypeError) as error:
            finish(call(**{argument: "something"}))
        assert str(error.value).endswith(reason)


def finish(result):
    """Run a coroutine to its first exception; what a method returns otherwise is left alone."""
    if inspect.iscoroutine(result):
        result.send(None)


def test_settings_are_taken_or_say_what_to_use():
    known = {field.name for field in fields(EngineArgs)}
    for name in NAMES["members"]["AsyncEngineArgs"]:
        if name in known or name in vllm_names.DRAFT_KEYS or name in vllm_names.MEMBERS["EngineArgs"]:
            continue
        if name in ("add_cli_args", "from_cli_args"):
            continue
        with pytest.raises(ValueError) as error:
            engine_settings({name: object()}, EngineConfig)
        assert str(error.value).endswith(vllm_names.PARAMETERS["EngineArgs"][name])


def commands() -> dict[str, typer.core.TyperCommand]:
    top: Any = get_command(app)
    found = dict(top.commands)
    return found | {f"bench {name}": each for name, each in found.pop("bench").commands.items()}


def test_commands_exist_or_say_what_to_use():
    for name in NAMES["commands"]:
        alone = name.removeprefix("bench ")
        assert (name in commands() or name == "bench") != (alone in vllm_names.COMMANDS), name


@pytest.mark.parametrize("command", [name for name in NAMES["flags"] if name in commands()])
def test_flags_are_taken_or_say_what_to_use(command):
    taken = {flag for param in commands()[command].params for flag in (*param.opts, *param.secondary_opts)}
    for flag in NAMES["flags"][command]:
        assert flag in taken or missing_flag(flag, EngineConfig), flag


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["serve", "-tp", "2"], "No such option: -tp: give --tensor-parallel-size"),
        (["serve", "--compilation-config.mode", "3"], "No such option: --compilation-config.mode: XLA compiles"),
        (["serve", "--runner=generate"], "No such option: --runner: a model's folder says whether it generates"),
        (["serve", "--speculative-config", "{}"], "give --speculative"),
        (["serve", "--no-enable-chunked-prefill"], "long prompts always run in chunks"),
        (["serve", "--max_model_len", "0"], "Invalid value for '--max-model-len'"),
        (["bench", "latency"], "No such command 'latency'. `jpaged bench throughput`"),
        (["collect-env"], "No such command 'collect-env'. `pip list`"),
        (["serve", "-z"], "No such option: -z\n"),
    ],
)
def test_a_command_line_of_vllm_says_what_to_use(args, words):
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 2 and words in result.output


@pytest.mark.parametrize("route", BODIES)
def test_fields_of_bodies_are_known_or_say_what_to_use(route):
    body = BODIES[route]
    names = {field.alias or name for name, field in body.model_fields.items()}
    known = names | body.classes.without_effect.keys() | body.classes.not_honoured.keys()
    for name in NAMES["fields"][route]:
        if name in known:
            continue
        with pytest.raises(ValidationError) as error:
            body.model_validate({name: 1})
        (first,) = error.value.errors()
        assert first["type"] == "refused_field" and first["msg"] == body.classes.refused[name]
        with pytest.raises(ValidationError) as error:  # false asks for nothing; other fields are missing
            body.model_validate({name: False, "nonesuch": 1})
        assert error.value.errors()[0]["ctx"]["field"] == "nonesuch"


def test_routes_exist_or_say_what_to_use():
    parts = (pages, status, completions, chat, responses, tokens, vectors, messages)
    paths = {route.path for part in parts for route in part.router.routes} | {"/tokenizer_info"}
    for route in NAMES["routes"]:
        path = route.split()[1]
        assert (path in paths) != (path in vllm_names.ROUTES), route


# ---------------------------------------------------------------- what vLLM's EngineArgs does


def test_engine_args_are_the_settings_that_were_given():
    args = EngineArgs(
        model="m", gpu_memory_utilization=0.5, swap_space=4, runner="generate", spec_method="ngram", spec_tokens=3
    )
    assert args.gpu_memory_utilization == 0.5 and args.max_model_len is None
    args.max_model_len = 77
    args.memory_utilization = 0.25
    made = EngineConfig(model="m", **engine_settings(args.settings(), EngineConfig))
    assert made.memory_utilization == 0.25 and made.max_model_len == 77 and made.preemption_mode == "auto"
    assert made.speculative == jpaged.NGram(3, longest=5, shortest=5)
    everything = asdict(args) | {"seed": 5}
    assert everything.pop("model") == "m"
    again = EngineConfig(model="m", **engine_settings(everything, EngineConfig))
    assert again.seed == 5 and again.max_model_len == 77 and again.preemption_mode == "auto"


def test_engine_args_refuse_what_an_llm_refuses():
    args = EngineArgs("m")
    for change, error, words in (
        ({"runner": "draft"}, ValueError, "a model's folder says whether it generates"),
        ({"nonesuch": 1}, TypeError, "is no setting of LLM"),
        ({"trust_remote_code": True}, ValueError, "no code of a model's repository"),
    ):
        with pytest.raises(error, match=words):
            EngineArgs("m", **change)
        ((name, value),) = change.items()
        with pytest.raises(error, match=words):
            setattr(args, name, value)
    assert args == EngineArgs("m") and args.settings() == {}


def test_engine_args_are_read_from_a_scripts_own_parser():
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.add_argument("--mine", type=int)
    line = (
        "--model m --max-model-len 64 --no-enable-prefix-caching --gpu-memory-utilization 0.5 --swap-space 3 --mine 2"
    )
    args = parser.parse_args([*line.split(), "--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}'])
    made = EngineArgs.from_cli_args(args)
    assert made.settings() == {
        "max_model_len": 64,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.5,
        "swap_space": 3.0,
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
    }
    given = {name: value for name, value in vars(args).items() if name not in ("mine", "model")}
    assert EngineConfig(model="m", **engine_settings(given, EngineConfig)).max_model_len == 64


@pytest.mark.parametrize("name", ["spec_method", "spec_model", "spec_tokens"])
def test_two_ways_to_ask_for_drafts_exclude_each_other(name):
    with pytest.raises(ValueError, match="speculative_config and spec_method, spec_model, spec_tokens are one setting"):
        engine_settings({name: "ngram", "speculative_config": {"method": "ngram"}}, EngineConfig)


def test_times_of_a_request_have_vllms_names():
    times = outputs.RequestMetrics(1.0, 2.0, 4.0, 9.0)
    assert (times.queued_ts, times.scheduled_ts, times.first_token_ts, times.last_token_ts) == (1.0, 2.0, 4.0, 9.0)
    assert times.first_token_latency == 3.0
    assert (METRICS.scheduled_ts, METRICS.first_token_ts, METRICS.last_token_ts) == (0.0, 0.0, 0.0)


def test_an_adapter_has_vllms_short_names():
    adapter = HELD["LoRARequest"]
    assert (adapter.name, adapter.adapter_id, adapter.path) == ("a", 3, "/a")

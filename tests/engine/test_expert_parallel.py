"""Whole experts on each device generate the tokens of one device, and lie nowhere else."""

from pathlib import Path

import pytest
from checkpoints import CHECKPOINTS, make_checkpoint
from dense_model import abstract
from greedy_reference import torch_greedy
from on_devices import printed_on_devices
from thorough import rarely
from tokens_by_devices import NUM_TOKENS, PROMPTS

from jpaged import LLM
from jpaged.config import EngineConfig

HERE = Path(__file__).parent
EXPERTS = 8
FLOAT, QUANTISED = ["2", "2 replicas of 4", "8"], ["int8 on 1", "int8 on 4"]
"""Names in `experts_by_devices.ENGINES`."""


def run(name, folder, engines, **changes):
    """Return what torch generates, and what the engines do and hold; `changes` are of the config's fields."""
    model = make_checkpoint(name, folder, **changes or {"num_local_experts": EXPERTS})
    expected = torch_greedy(model, PROMPTS, NUM_TOKENS)
    return expected, printed_on_devices(8, HERE / "experts_by_devices.py", folder, *engines)


@pytest.fixture(scope="module")
def llama4(tmp_path_factory):
    return run("llama4", tmp_path_factory.mktemp("llama4"), FLOAT)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    return run("gpt_oss", tmp_path_factory.mktemp("gpt_oss"), FLOAT + QUANTISED)


@pytest.mark.parametrize("name", [rarely("llama4"), "gpt_oss"])
def test_any_number_of_devices_generates_the_tokens_of_transformers(name, request):
    expected, engines = request.getfixturevalue(name)
    assert sum(reference.certain for reference in expected) >= 0.95 * sum(len(r.tokens) for r in expected)
    for engine in FLOAT:
        for tokens, reference in zip(engines[engine]["tokens"], expected, strict=True):
            assert tokens[: reference.certain] == reference.tokens[: reference.certain], engine


@pytest.mark.parametrize("name", [rarely("mixtral"), rarely("deepseek_v3")])
def test_experts_with_tensors_of_their_own_and_beside_shared_ones_are_spread_too(name, tmp_path):
    changes = {"num_local_experts": 6, "num_hidden_layers": 2}
    expected, engines = run(name, tmp_path, ["2"], **changes)
    for tokens, reference in zip(engines["2"]["tokens"], expected, strict=True):
        assert tokens[: reference.certain] == reference.tokens[: reference.certain]
    assert engines["2"]["experts"] == [[0, 1, 2], [3, 4, 5]]


def test_quantised_experts_generate_the_same_on_any_number_of_devices(gpt_oss):
    """An output's scale is the same wherever it lies."""
    engines = gpt_oss[1]
    assert engines["int8 on 4"]["tokens"] == engines["int8 on 1"]["tokens"]
    assert engines["int8 on 4"]["tokens"] != engines["2"]["tokens"]


def test_a_device_holds_its_own_experts_only(gpt_oss):
    """Replicas hold the same experts again."""
    held = {name: engine["experts"] for name, engine in gpt_oss[1].items()}
    assert held["2"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert held["int8 on 4"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert held["2 replicas of 4"] == 2 * held["int8 on 4"]
    assert held["8"] == [[expert] for expert in range(EXPERTS)]


def test_a_model_without_experts_is_refused(tmp_path):
    make_checkpoint("llama", tmp_path)
    with pytest.raises(ValueError, match="enable_expert_parallel=True, but Llama has no experts"):
        LLM(str(tmp_path), enable_expert_parallel=True)
    make_checkpoint("llama4", tmp_path / "dense", moe_layers=[])
    with pytest.raises(ValueError, match=r"enable_expert_parallel=True, but moe_layers=\[\]: there are no experts"):
        LLM(str(tmp_path / "dense"), enable_expert_parallel=True)


@pytest.mark.parametrize("name", ["llama4", "gpt_oss"])
def test_experts_that_do_not_divide_over_the_devices_are_refused_with_both_numbers(name):
    message = "enable_expert_parallel=True: 5 experts do not divide over tensor_parallel_size=2 devices"
    with pytest.raises(ValueError, match=message):
        abstract(CHECKPOINTS[name], tensor_parallel=2, expert_parallel=True)


def test_the_setting_is_true_or_false():
    with pytest.raises(ValueError, match="enable_expert_parallel=2 must be True or False"):
        EngineConfig(model="some/model", enable_expert_parallel=2)

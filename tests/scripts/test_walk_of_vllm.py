"""Names of vLLM are found in its source, and in nothing that is imported."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "vllm_names.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("walk_of_vllm", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_names_are_found_in_sources_without_importing_them(script, tmp_path):
    for file, text in {
        "PKG-INFO": "Name: vllm\nVersion: 9.9.9\n",
        "README.md": "```python\nfrom vllm import LLM\nllm = LLM(setting=1)\nllm.newest()\n"
        "llm.generate(extra=1)\n```\n",
        "docs/a.md": "1. Do:\n   ```python\n   from vllm.lora.request import (\n       LoRARequest,\n   )\n"
        "   f(a=)\n   ```\n",
        "examples/a.py": "import vllm.envs as envs\nfrom vllm import LLM, EngineArgs\n"
        "made = EngineArgs('m')\nmade.dtype\n",
        "vllm/__init__.py": "raise AssertionError('imported')\n__all__ = ['LLM', 'PoolingParams']\n",
        "vllm/entrypoints/__init__.py": "",
        "vllm/entrypoints/base.py": "class Mixin:\n    def score(self, data): self.cache = 1\n    _private: int = 1\n",
        "vllm/entrypoints/llm.py": "from .base import Mixin\nclass LLM(Mixin):\n    kind: str = 'a'\n"
        "    def __init__(self): self.engine = 1\n    def generate(self, prompts, *, seed=None): ...\n",
        "vllm/entrypoints/cli/serve.py": "class Serve:\n    name = 'serve'\np.add_argument('--new-flag', '-nf')\n",
        "vllm/entrypoints/cli/benchmark/a.py": "class Bench:\n    name = 'latency'\n",
        "vllm/entrypoints/api.py": "@router.post('/v1/new')\nasync def new(): ...\n",
        "vllm/entrypoints/openai/completion/protocol.py": "class CompletionRequest(Base):\n    prompt: str\n",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    found = script.names(tmp_path)
    assert found["version"] == "9.9.9" and found["commands"] == ["bench latency", "serve"]
    assert found["imports"]["vllm"] == ["EngineArgs", "LLM", "PoolingParams"]
    assert found["imports"]["vllm.lora.request"] == ["LoRARequest"] and found["imports"]["vllm.envs"] == []
    assert found["members"]["LLM"] == ["engine", "generate", "kind", "newest", "score"]
    assert found["members"]["EngineArgs"] == ["dtype", "setting"]
    assert found["arguments"] == {"LLM.generate": ["extra", "prompts", "seed"], "LLM.score": ["data"]}
    assert found["flags"]["serve"] == ["--new-flag", "-nf"] and found["routes"] == ["POST /v1/new"]
    assert found["fields"]["/v1/completions"] == ["prompt"]

"""Writes ``written_by_0_2_0`` with the jpaged that is installed: run it with that version's checkout alone.

    python tests/contract/write_fixtures.py

The models are made by torch and PEFT; all else by the public API.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), *(str(HERE.parent / name) for name in (".", "engine", "models"))]

from golden_runs import LLAMA, MODELS, ON_DEVICES, RUNS, SMALL, WRITTEN, random_prompts  # noqa: E402
from lora_checkpoints import save_all  # noqa: E402
from on_devices import printed_on_devices  # noqa: E402
from tiny_chat_model import byte_level_tokenizer, make_chat_model  # noqa: E402
from vision_checkpoints import make_gemma3  # noqa: E402

import jpaged  # noqa: E402
from jpaged import LLM, SamplingParams  # noqa: E402
from jpaged.loading import convert_checkpoint  # noqa: E402

STATE_PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=1, max_tokens=20, ignore_eos=True, n=2),
]


def write_models() -> None:
    make_chat_model(Path(LLAMA))
    byte_level_tokenizer().save_pretrained(LLAMA)
    make_gemma3(MODELS / "gemma3")
    save_all("llama", WRITTEN / "made", ("small", "all"))
    (MODELS / "adapters").mkdir()
    for name in ("small", "all"):
        (WRITTEN / "made" / name).rename(MODELS / "adapters" / name)
    (WRITTEN / "made" / "llama").rename(MODELS / "lora_llama")
    shutil.rmtree(WRITTEN / "made")


def write_state() -> None:
    """Save two requests in the middle of their answers, by abandoning a stream after a few deltas."""
    llm = LLM(LLAMA, **SMALL)
    stream = llm.stream(random_prompts(20, 9), STATE_PARAMS)
    for _ in range(6):
        next(stream)
    llm.save_state(WRITTEN / "state")
    stream.close()
    other = LLM.restore_state(WRITTEN / "state")
    outputs = sorted(other.resume(use_tqdm=False), key=lambda output: len(output.prompt_token_ids))
    found = [[list(sample.token_ids) for sample in output.outputs] for output in outputs]
    (WRITTEN / "state_answers.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    assert jpaged.__version__ == "0.2.0", jpaged.__version__
    shutil.rmtree(WRITTEN, ignore_errors=True)
    MODELS.mkdir(parents=True)
    write_models()
    golden = {name: run() for name, run in RUNS.items()}
    golden |= printed_on_devices(8, HERE / "golden_runs.py", *ON_DEVICES)
    (WRITTEN / "golden_tokens.json").write_text(json.dumps(golden) + "\n")
    write_state()
    for form in ("int8", "int4"):
        convert_checkpoint(LLAMA, WRITTEN / f"checkpoint_{form}", dtype="float32", quantization=form)
    LLM.compile_programs(LLAMA, WRITTEN / "programs", use_tqdm=False, **SMALL)
    for each in (WRITTEN / "programs").iterdir():  # the manifest is read, and refused, before any of them
        if each.name != "programs.json":
            shutil.rmtree(each) if each.is_dir() else each.unlink()

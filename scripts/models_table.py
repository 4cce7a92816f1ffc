"""Makes the table of families in docs/models.md: from the registry, the families' code, and the tests.

    python scripts/models_table.py            prints it
    python scripts/models_table.py --write    writes it into the page, which a test compares with it

Only `NAMES` is written by hand. What a family takes is asked of the code that decides it, with the tests' tiny configs
of the family; what judged a family is what the tests' own lists say. The script needs what the tests need.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.util
import inspect
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from jpaged import NGram
from jpaged.config import EngineConfig
from jpaged.engine.whole_prompts import for_whole_prompts
from jpaged.loading.gguf.config import ARCHITECTURES
from jpaged.loading.lora.sites import adaptable_targets, attends_to_images
from jpaged.loading.parameters.targets import abstract_model, targets_of
from jpaged.loading.registry import GROUP, around_text, model_class
from jpaged.model_api import (
    BuildContext,
    CausalLM,
    Cuttable,
    HasDraftHead,
    LatentGroup,
    PacksImages,
    TakesImages,
)

ROOT = Path(__file__).resolve().parents[1]
PAGE, TESTS = ROOT / "docs" / "models.md", ROOT / "tests"
BEGIN, END = "<!-- families: made by scripts/models_table.py -->\n", "<!-- /families -->\n"

NAMES: dict[str, str] = {
    "llama": "Llama 2, 3 to 3.3; SmolLM2; TinyLlama; Yi; DeepSeek-R1-Distill-Llama",
    "mistral": "Mistral 7B, Nemo, Small 3; Ministral 8B as published",
    "ministral": "Ministral 8B (2410) in transformers' form",
    "ministral3": "Ministral 3 3B, 8B, 14B",
    "mistral3": "Mistral Small 3.1, 3.2; Magistral Small 1.2; Ministral 3; around the text model that the config names",
    "mixtral": "Mixtral 8x7B, 8x22B",
    "mistral4": "Mistral Small 4 119B",
    "qwen2": "Qwen2, Qwen2.5, QwQ-32B; DeepSeek-R1-Distill-Qwen",
    "qwen2_moe": "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
    "qwen2_vl_text": "Qwen2-VL 2B, 7B, 72B",
    "qwen2_vl": "Qwen2-VL 2B, 7B, 72B",
    "qwen2_5_vl_text": "Qwen2.5-VL 3B, 7B, 32B, 72B",
    "qwen2_5_vl": "Qwen2.5-VL 3B, 7B, 32B, 72B",
    "qwen3": "Qwen3-0.6B to 32B; Qwen3-Embedding, Qwen3-Reranker",
    "qwen3_moe": "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder-30B-A3B",
    "qwen3_vl_text": "Qwen3-VL 2B, 4B, 8B, 32B",
    "qwen3_vl": "Qwen3-VL 2B, 4B, 8B, 32B",
    "qwen3_vl_moe_text": "Qwen3-VL-30B-A3B, Qwen3-VL-235B-A22B",
    "qwen3_vl_moe": "Qwen3-VL-30B-A3B, Qwen3-VL-235B-A22B",
    "qwen3_next": "Qwen3-Next-80B-A3B, Qwen3-Coder-Next",
    "qwen3_5_text": "Qwen3.5-4B, 9B, 27B",
    "qwen3_5": "Qwen3.5-4B, 9B, 27B",
    "qwen3_5_moe_text": "Qwen3.5-35B-A3B, 122B-A10B, 397B-A17B",
    "qwen3_5_moe": "Qwen3.5-35B-A3B, 122B-A10B, 397B-A17B",
    "gemma": "Gemma 2B, 7B; CodeGemma",
    "gemma2": "Gemma 2 2B, 9B, 27B",
    "gemma3_text": "Gemma 3 270M, 1B; EmbeddingGemma",
    "gemma3": "Gemma 3 4B, 12B, 27B; MedGemma 4B",
    "gemma4_text": "Gemma 4 E2B, E4B, 31B, 26B-A4B",
    "gemma4": "Gemma 4 E2B, E4B, 31B, 26B-A4B",
    "gemma4_unified_text": "Gemma 4 12B",
    "gemma4_unified": "Gemma 4 12B",
    "llama4_text": "Llama 4 Scout, Maverick",
    "mllama": "Llama 3.2 Vision 11B, 90B",
    "mllama_text_model": "Llama 3.2 Vision's text model",
    "llava_onevision": "LLaVA-OneVision 0.5B, 7B, 72B",
    "llava": "LLaVA 1.5 7B, 13B; Pixtral 12B",
    "llava_next": "LLaVA-NeXT 7B, 13B, 34B",
    "idefics3": "Idefics 3 8B; SmolVLM 256M, 500M, 2.2B",
    "smolvlm": "SmolVLM2 256M, 500M, 2.2B",
    "gpt_oss": "gpt-oss-20b, gpt-oss-120b",
    "gpt2": "GPT-2 to XL; DistilGPT-2",
    "gpt_neox": "GPT-NeoX-20B; Pythia; Dolly 2",
    "opt": "OPT 125M to 66B",
    "phi": "Phi-1, Phi-1.5, Phi-2",
    "phi3": "Phi-3 mini, medium; Phi-3.5 mini; Phi-4, Phi-4-mini",
    "granite": "Granite 3.0 to 3.3 2B, 8B",
    "granitemoe": "Granite 3.0 and 3.1 1B-A400M, 3B-A800M",
    "granitemoehybrid": "Granite 4.0 Micro, H-Micro, H-Tiny, H-Small",
    "bamba": "Bamba-9B v1, v2",
    "olmo2": "OLMo 2 1B, 7B, 13B, 32B",
    "olmo3": "Olmo 3 7B, 32B",
    "olmoe": "OLMoE-1B-7B",
    "smollm3": "SmolLM3-3B",
    "glm": "GLM-4-9B as transformers has it; GLM-Edge",
    "glm4": "GLM-4-9B-0414, GLM-4-32B-0414, GLM-Z1",
    "glm4_moe": "GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "glm4v_text": "GLM-4.1V-9B, GLM-4.6V-Flash",
    "glm4v": "GLM-4.1V-9B",
    "glm4v_moe_text": "GLM-4.5V, GLM-4.6V",
    "glm4v_moe": "GLM-4.5V",
    "glm46v": "GLM-4.6V, GLM-4.6V-Flash",
    "seed_oss": "Seed-OSS-36B",
    "ernie4_5": "ERNIE-4.5-0.3B",
    "paddleocr_vl_text": "PaddleOCR-VL-0.9B",
    "paddleocr_vl": "PaddleOCR-VL-0.9B",
    "ernie4_5_moe": "ERNIE-4.5-21B-A3B, 300B-A47B",
    "hunyuan_v1_dense": "Hunyuan 0.5B, 1.8B, 4B, 7B",
    "hunyuan_v1_moe": "Hunyuan-A13B",
    "cohere": "Command R, Command R+; Aya 23",
    "cohere2": "Command R7B, Command A",
    "exaone4": "EXAONE 4.0 1.2B, 32B",
    "arcee": "AFM-4.5B",
    "nemotron": "Minitron 4B, 8B; Nemotron-4 340B in transformers' form",
    "nemotron_h": "Nemotron-H 8B, 47B, 56B; Nemotron Nano 2; Nemotron 3 Nano",
    "cwm": "Code World Model 32B",
    "starcoder2": "StarCoder2 3B, 7B, 15B",
    "stablelm": "StableLM 3B-4E1T; StableLM 2 1.6B, 12B; Stable Code 3B",
    "apertus": "Apertus 8B, 70B",
    "dots1": "dots.llm1",
    "minimax_m2": "MiniMax-M2, M2.1, M2.5",
    "deepseek_v2": "DeepSeek-V2, V2-Lite, V2.5; DeepSeek-Coder-V2",
    "deepseek_v3": "DeepSeek-V3, V3.1, R1; Moonlight",
    "jamba": "Jamba v0.1, 1.5 to 1.7",
    "mamba2": "Mamba-2 130M to 2.7B in transformers' form; Mamba-Codestral-7B",
    "falcon_h1": "Falcon-H1 0.5B to 34B",
    "lfm2": "LFM2 350M, 700M, 1.2B, 2.6B",
    "lfm2_moe": "LFM2-8B-A1B",
    "llama4": "Llama 4 Scout, Maverick",
    "lfm2_vl": "LFM2-VL 450M, 1.6B, 3B",
    "internvl": "InternVL3 1B to 78B in transformers' form",
    "bert": "BERT; all-MiniLM-L6-v2; BGE v1.5; E5; mxbai-embed-large; ms-marco-MiniLM rerankers",
    "roberta": "RoBERTa; all-distilroberta-v1",
    "xlm-roberta": "XLM-RoBERTa; BGE-M3; multilingual-E5; bge-reranker-v2-m3",
    "distilbert": "DistilBERT; multi-qa-distilbert",
    "mpnet": "all-mpnet-base-v2, multi-qa-mpnet-base",
    "nomic_bert": "nomic-embed-text-v1, v1.5",
    "modernbert": "ModernBERT; gte-modernbert-base; modernbert-embed-base",
    "gte": "gte-multilingual-base as transformers has it",
    "new": "gte-base and gte-large v1.5, gte-multilingual-base as published",
}
"""Each registered ``model_type`` -> checkpoints that people know, in the order of the table."""

PUBLISHED = {"llama": "engine/test_demo_model_tokens.py", "bert": "engine/test_published_encoder.py"}
"""Types of published weights that a test compares with transformers -> that test."""
WITH_IMAGES = {
    "gemma3": "engine/test_vision_engine.py",
    "llava_onevision": "engine/test_llava_engine.py",
    "mllama": "engine/test_mllama_engine.py",
    "mllama_text_model": "engine/test_mllama_engine.py",
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), "engine/test_qwen_vl.py"
    ),
    **dict.fromkeys(("llava", "llava_next", "idefics3", "smolvlm"), "engine/test_qwen_vl.py"),
    **dict.fromkeys(("mistral3", "internvl", "lfm2_vl", "llama4"), "engine/test_qwen_vl.py"),
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v", "paddleocr_vl"), "engine/test_qwen_vl.py"),
    **dict.fromkeys(("gemma4", "gemma4_unified", "gemma4_unified_text"), "engine/test_gemma4_vision.py"),
}
"""Types with image encoders, and of one's text model -> where their tokens are compared with transformers'."""
GGUF_ENCODERS = dict.fromkeys(("bert", "modernbert", "nomic_bert"), "loading/gguf/test_gguf_encoders.py")
"""Encoders -> where vectors of their GGUF files are compared with transformers'."""
OF_OTHER_TYPES = {"new": "models/test_encoders.py"}
"""Types that transformers lacks -> where they are compared with its class of another type."""

JUDGES = {
    "L": "logits",
    "T": "tokens of an engine under stress",
    "G": "a GGUF file's tensors and tokens",
    "A": "adapters' tokens, with PEFT",
    "H": "the drafting head's logits, with the published layout",
    "V": "vectors",
    "**W**": "the same with published weights",
}
"""Marks of the table -> what the tests compare with transformers on torch."""


def of_tests(file: str) -> ModuleType:
    """Return a module of the tests, by its path below them; what it imports is found as pytest finds it."""
    for folder in ("", "models", "engine", "loading", "loading/gguf"):
        if (path := str(TESTS / folder)) not in sys.path:
            sys.path.append(path)
    name = "listed_" + file.removesuffix(".py").replace("/", "_")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, TESTS / file)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def registered() -> set[str]:
    """Return the model types that this package registers."""
    return {entry.name for entry in distribution("jpaged").entry_points if entry.group == GROUP}


def tiny_configs() -> dict[str, list[Any]]:
    """Return transformers' tiny configs of the tests by ``model_type``."""
    listed = of_tests("models/checkpoints.py").CHECKPOINTS, of_tests("models/dense_families.py").DENSE_FAMILIES
    vision = of_tests("engine/vision_checkpoints.py")
    found = [config for configs in listed for config in configs.values()]
    found += [*_texts(), vision.gemma3_config(), vision.llava_config(), vision.mllama_config()]
    found.append(vision.mllama_config().get_text_config())
    found += [make()[1] for make in of_tests("engine/qwen_vl_checkpoints.py").FAMILIES.values()]
    with_eyes = [make() for make in of_tests("engine/gemma4_checkpoints.py").FAMILIES.values()]
    found += [*with_eyes, with_eyes[-1].get_text_config()]
    by_type = defaultdict(list)
    for config in found:
        for part in (config, config.get_text_config()):
            if not hasattr(part, "tie_word_embeddings"):  # a text model's config leaves it to the whole model's
                part.tie_word_embeddings = False
        by_type[config.model_type].append(config)
    return by_type


def _texts() -> Iterator[Any]:
    """Yield configs of the text models that the tests load out of models with images."""
    whole = of_tests("loading/test_language_model_only.py").MULTIMODAL
    for _, config in (*of_tests("models/wrapped_families.py").BY_THEIR_TEXT.values(), *whole.values()):
        yield config.get_text_config()


def judged() -> dict[str, set[str]]:
    """Return the model types that tests compare with transformers, by the mark of what they compare."""
    checkpoints = of_tests("models/checkpoints.py").CHECKPOINTS
    every = checkpoints | of_tests("models/dense_families.py").DENSE_FAMILIES
    dense = types_of(of_tests("models/dense_families.py").DENSE_FAMILIES.values())
    engine = of_tests("engine/test_engine_families.py").BY_TRANSFORMERS
    with_peft = of_tests("engine/lora_checkpoints.py").CONFIGS
    return {
        "L": types_of(checkpoints.values()) | dense | types_of(_texts()),
        "T": types_of(checkpoints[name] for name in engine) | dense | WITH_IMAGES.keys(),
        "G": types_of(of_tests("loading/gguf/test_gguf_families.py").CONFIGS) | GGUF_ENCODERS.keys(),
        "A": types_of(checkpoints[name] for name in of_tests("engine/test_lora_families.py").FAMILIES)
        | types_of(with_peft.values()),
        "H": types_of(every[case.values[0]] for case in of_tests("models/test_mtp.py").FAMILIES),
        "V": types_of(of_tests("models/encoder_checkpoints.py").ENCODERS.values()) | OF_OTHER_TYPES.keys(),
        "**W**": set(PUBLISHED),
    }


def types_of(configs: Iterable[Any]) -> set[str]:
    """Return the model types of configs."""
    return {config.model_type for config in configs}


def architectures() -> dict[str, list[str]]:
    """Return the GGUF architectures that become each model type: those whose functions name it."""
    found = defaultdict(list)
    for name, function in ARCHITECTURES.items():
        for model_type in named_types(function):
            found[model_type].append(name)
    return found


def named_types(function: Callable[..., Any]) -> set[str]:
    """Return the values that a function gives ``model_type``, and those of the functions whose results it returns as
    they are; where there are none, those of all functions of its module that it calls."""
    found: set[str] = set()
    returned, called = [], []
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.keyword) and node.arg == "model_type":
            found.add(ast.literal_eval(node.value))
        elif isinstance(node, ast.Dict):
            keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
            found |= {ast.literal_eval(node.values[keys.index("model_type")])} if "model_type" in keys else set()
        elif isinstance(node, ast.Return):
            returned.append(node.value)
        elif isinstance(node, ast.Call):
            called.append(node)
    for node in returned if found else called:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            other = function.__globals__.get(node.func.id)
            if inspect.isfunction(other) and other.__module__ == function.__module__:
                found |= named_types(other)
    return found


def kept(models: list[CausalLM]) -> str:
    """Return what layers keep of a sequence, by the names of the engine's layer groups."""
    groups = dict.fromkeys(
        "latents" if isinstance(group, LatentGroup) else group.name for model in models for group in model.layer_groups
    )
    return ", ".join(groups)


def lora(models: list[CausalLM]) -> str:
    """Return whether adapters can change a model: all that they may, all but routed experts, or nothing."""
    if any(attends_to_images(model) or not adaptable_targets(model) for model in models):
        return ""
    stacks = [
        target
        for model in models
        for target in targets_of(model)
        if target.path[0] == "layers" and target.source.contracted is not None and len(target.shape) == 3
    ]
    return "◐" if stacks else "●"


def drafts(family: type[Any], configs: list[Any], models: list[CausalLM]) -> str:
    """Return what can draft for a model: n-grams, a draft model and its first layers, or its checkpoint's head too."""
    for model in models:
        assert isinstance(model, Cuttable)
        model.cut(1)  # raises if it has no first layers
    no_head = any(isinstance(model, TakesImages) and not isinstance(model, PacksImages) for model in models)
    if not issubclass(family, HasDraftHead) or no_head:
        return "●"
    config = copy.deepcopy(configs[0].get_text_config())
    config.num_nextn_predict_layers = 1
    try:
        abstract_model(family.draft_head, config, BuildContext(dtype=np.dtype(np.float32)))  # type: ignore[arg-type]
    except ValueError:  # this type of the family's has none
        return "●"
    return "● head"


def check_encoders_refuse(model: Any) -> None:
    """Check that an engine of this encoder takes neither adapters nor drafts, as its row says by empty cells."""
    for setting in ({"enable_lora": True}, {"speculative": NGram()}):
        try:
            for_whole_prompts(None, EngineConfig(model="an encoder", **setting), model)  # type: ignore[arg-type]
        except ValueError:
            continue
        raise AssertionError(f"an encoder takes {setting}: say so in its row")


def table() -> str:
    """Return the table's lines and its legend."""
    configs, judges, files = tiny_configs(), judged(), architectures()
    texts = types_of(_texts())
    head = ("`model_type`", "checkpoints", "layers keep", "images", "LoRA", "drafts", "GGUF", "judged")
    lines = [head, ("---", "---", "---", ":-:", ":-:", "---", "---", "---")]
    for model_type, names in NAMES.items():
        registered_as: Any = model_class(model_type)
        families = [around_text(registered_as, config) for config in configs[model_type]]
        family = families[0] if families else registered_as
        if getattr(family, "encodes_prompts", False):
            check_encoders_refuse(None)
            cells = ["(vectors)", "", "", ""]
        else:
            build = BuildContext(dtype=np.dtype(np.float32))
            models = [abstract_model(*each, build) for each in zip(families, configs[model_type], strict=True)]
            images = "●" if isinstance(models[0], TakesImages) else "text" if model_type in texts else ""
            cells = [kept(models), images, lora(models), drafts(family, configs[model_type], models)]
        named = " ".join(f"`{name}`" for name in files.get(model_type, ()))
        marks = " ".join(mark for mark, types in judges.items() if model_type in types)
        lines.append((f"`{model_type}`", names, *cells, named, marks))
    rows = ["|" + "".join(f" {cell} |" if cell else " |" for cell in line) for line in lines]
    return "\n".join([*rows, "", *_legend()]) + "\n"


def _legend() -> Iterator[str]:
    marks = "; ".join(f"{mark} {what}" for mark, what in JUDGES.items())
    yield from textwrap.wrap(
        "**layers keep**: layer groups of the tests' checkpoints, see [Concepts](concepts.md); encoders keep nothing "
        "and make [vectors](vectors.md). **images**: [● takes them](images.md); text: the language model of checkpoints"
        " that take images is loaded. **LoRA**: ● linear layers, ◐ all but routed experts; [what is "
        "refused](lora.md#accepted-and-refused). **drafts**: ● n-grams, the first layers, a draft model, EAGLE-3, "
        "DFlash or a Gemma 4 assistant; head: the checkpoint's own too ([speculative](speculative.md)). **judged** on "
        f"small random checkpoints, by transformers on PyTorch: {marks}.",
        width=128,
        break_long_words=False,
        break_on_hyphens=False,
    )


def filled(page: str) -> str:
    """Return a page with the table between its two comments."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks {BEGIN.strip()} or {END.strip()}")
    return f"{before}{begin}\n{table()}\n{end}{after}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    if parser.parse_args(arguments).write:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"wrote {PAGE}")
    else:
        print(table(), end="")


if __name__ == "__main__":
    main()

"""Measures what pictures cost next to transformers: a tower alone, a first token, questions on one picture."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from PIL import Image

from jpaged import LLM, SamplingParams
from jpaged.execution.image_rows import ImageRows, Item
from jpaged.execution.prompt_attention import SegmentAttention
from jpaged.images import ImageSources, open_image_processor, read_images
from jpaged.loading.load import load_model
from pallas_kernels.cpu_cores import num_cores
from scripts.benchmarks.pictures import BEGIN, END, IMAGE, MERGE, drawn, prompt_of, write_qwen
from scripts.cases import Row


class Spent(NamedTuple):
    """Seconds by the clock, and of processor time of all threads."""

    clock: float
    processor: float


class _Case(NamedTuple):
    """What is measured of one model.

    Attributes:
        peer: the model in transformers.
        patches: of each picture.
        questions, tokens: how many are asked about a picture, and tokens of each answer.
    """

    folder: str
    dtype: str
    peer: _Torch
    patches: int
    rounds: int
    questions: int
    tokens: int


def towers(
    patches: list[int] = [256, 1024, 4096],  # noqa: B006
    dtypes: list[str] = ["float32", "bfloat16"],  # noqa: B006
    measures: list[str] = ["tower", "first token", "questions"],  # noqa: B006
    text: list[int] = [512, 6],  # noqa: B006
    tower: list[int] = [1024, 24],  # noqa: B006
    questions: int = 8,
    tokens: int = 8,
    rounds: int = 5,
) -> Iterator[Row]:
    """Seconds of a picture's tower alone, to a first token, and of questions on one picture, next to transformers.

    The model is a Qwen3-VL of random numbers; --text and --tower are widths and numbers of layers; the tower is by
    default that of Qwen3-VL 2B and 4B. All sides take turns in one process, and each round has new pictures; the first
    round compiles and is left out. "times" is the median of the rounds' ratios, transformers' seconds over jpaged's;
    "by processor" is the same of processor time, which other work changes less. "times uncached" is that of as many
    questions on pictures of their own. Each question has 16 tokens, and its answer --tokens.

    Raises:
        ValueError: a measure is not known.
    """
    known: Mapping[str, Callable[[_Case], dict[str, list[Spent]]]] = {
        "tower": _tower,
        "first token": _first_token,
        "questions": _questions,
    }
    if unknown := sorted(set(measures) - set(known)):
        raise ValueError(f"--measures has {unknown[0]!r}: it takes {', '.join(known)}")
    with tempfile.TemporaryDirectory() as folder:
        write_qwen(Path(folder), max(patches), text, tower)
        for dtype in dtypes:
            peer = _Torch(folder, dtype)
            for measure in measures:
                for number in patches:
                    found = known[measure](_Case(folder, dtype, peer, number, rounds, questions, tokens))
                    yield {"measure": measure, "dtype": dtype, "patches": number, **_compared(found)}


def _compared(found: Mapping[str, list[Spent]]) -> Row:
    """Return the medians of all rounds but the first, and of their ratios to jpaged's."""
    rounds = {side: spent[1:] for side, spent in found.items()}
    own = rounds["jpaged"]
    row: Row = {"seconds": statistics.median(spent.clock for spent in own)}
    for side, named in (("transformers", ""), ("uncached", " uncached")):
        if side in rounds:
            pairs = list(zip(rounds[side], own, strict=True))
            row[f"times{named}"] = statistics.median(other.clock / ours.clock for other, ours in pairs)
            row[f"by processor{named}"] = statistics.median(other.processor / ours.processor for other, ours in pairs)
    return row | {"threads": num_cores(), "load": os.getloadavg()[0]}


def _in_turns(
    rounds: int, sides: Mapping[str, Callable[[Any], Any]], asked: Callable[[int], Mapping[str, Any]]
) -> dict[str, list[Spent]]:
    """Return what each side spends in each round, and in one before that compiles; the order changes by turns."""
    found: dict[str, list[Spent]] = {side: [] for side in sides}
    for turn in range(rounds + 1):
        given = asked(turn)
        for side in list(sides)[:: 1 if turn % 2 else -1]:
            clock, processor = time.perf_counter(), time.process_time()
            sides[side](given[side])
            found[side].append(Spent(time.perf_counter() - clock, time.process_time() - processor))
    return found


class _Torch:
    """The model in transformers, with its own processor."""

    def __init__(self, folder: str, dtype: str):
        import torch
        from transformers import Qwen2VLImageProcessorPil, Qwen3VLForConditionalGeneration

        torch.set_num_threads(num_cores())
        self.torch = torch
        made = Qwen3VLForConditionalGeneration.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
        self.model = made.eval()
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(folder)

    def pixels(self, picture: Image.Image) -> Mapping[str, Any]:
        """Return the patches of a picture and their grid."""
        return dict(self.processor(images=[picture], return_tensors="pt"))

    def features(self, pixels: Mapping[str, Any]) -> Any:
        """Return what the tower makes of patches."""
        with self.torch.inference_mode():
            numbers = pixels["pixel_values"].to(self.model.dtype)
            return self.model.model.visual(numbers, grid_thw=pixels["image_grid_thw"])

    def answer(self, prompt: Mapping[str, Any], tokens: int) -> list[int]:
        """Return so many greedy tokens after a prompt of one picture."""
        (picture,) = prompt["multi_modal_data"]["image"]
        pixels = self.pixels(picture)
        number = int(pixels["image_grid_thw"].prod()) // MERGE**2
        ids = [token for each in prompt["prompt_token_ids"] for token in ([each] * (number if each == IMAGE else 1))]
        whole = self.torch.tensor([ids])
        with self.torch.inference_mode():
            made = self.model.generate(
                input_ids=whole,
                attention_mask=self.torch.ones_like(whole),
                mm_token_type_ids=(whole == IMAGE).int(),
                pixel_values=pixels["pixel_values"].to(self.model.dtype),
                image_grid_thw=pixels["image_grid_thw"],
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        answer: list[int] = made[0, len(ids) :].tolist()
        _check_length(answer, tokens)
        return answer


def _check_length(answer: Sequence[int], tokens: int) -> None:
    if len(answer) != tokens:
        raise ValueError(f"an answer has {len(answer)} tokens where --tokens asks {tokens}: sides would not compare")


def _tower(case: _Case) -> dict[str, list[Spent]]:
    patches = case.patches
    loaded = load_model(case.folder, dtype=case.dtype)
    model: Any = loaded.model
    processor = open_image_processor(case.folder, loaded.config, loaded.tokenizer, model.image_processor)
    rows = ImageRows(model.row_layout, patches)

    def row_of(picture: Image.Image) -> dict[str, np.ndarray]:
        (read,) = read_images([picture], ImageSources())
        (made,) = processor.prepare_parts(read, alone=True)
        places = np.zeros(model.row_layout.num_features(patches), np.int32)
        (row,) = rows.joined([[Item(made.arrays, places)]], lambda number: np.zeros(number, np.int32))
        return {name: array[0] for name, array in row.arrays.items()}

    @jax.jit
    def features(params: nnx.State, row: Mapping[str, jax.Array]) -> jax.Array:
        sees: Any = nnx.merge(loaded.graphdef, params)
        within = SegmentAttention(loaded.mesh, model.row_layout.segments, row, patches, impl=None)
        return sees.encode(row, within)

    def asked(turn: int) -> Mapping[str, Any]:
        picture = drawn(patches, turn)
        return {"jpaged": row_of(picture), "transformers": case.peer.pixels(picture)}

    sides: dict[str, Callable[[Any], Any]] = {
        "jpaged": lambda row: features(loaded.params, row).block_until_ready(),
        "transformers": case.peer.features,
    }
    return _in_turns(case.rounds, sides, asked)


def _first_token(case: _Case) -> dict[str, list[Spent]]:
    with _engine(case, sequences=1) as llm:
        sides: dict[str, Callable[[Any], Any]] = {
            "jpaged": lambda prompt: _answer_all(llm, [prompt], 1),
            "transformers": lambda prompt: case.peer.answer(prompt, 1),
        }
        return _in_turns(case.rounds, sides, lambda turn: dict.fromkeys(sides, prompt_of(drawn(case.patches, turn))))


def _questions(case: _Case) -> dict[str, list[Spent]]:
    number, tokens = case.questions, case.tokens
    with _engine(case, sequences=number) as llm:

        def asked(turn: int) -> Mapping[str, Any]:
            pictures = [drawn(case.patches, (number + 1) * turn + each) for each in range(number + 1)]
            about = [_question(pictures[-1], each) for each in range(number)]
            uncached = [_question(picture, each) for each, picture in enumerate(pictures[:-1])]
            return {"jpaged": about, "transformers": about, "uncached": uncached}

        sides: dict[str, Callable[[Any], Any]] = {
            "jpaged": lambda prompts: _answer_all(llm, prompts, tokens),
            "transformers": lambda prompts: [case.peer.answer(prompt, tokens) for prompt in prompts],
            "uncached": lambda prompts: _answer_all(llm, prompts, tokens),
        }
        return _in_turns(case.rounds, sides, asked)


def _answer_all(llm: LLM, prompts: list[dict[str, Any]], tokens: int) -> None:
    """Let jpaged answer each prompt with so many greedy tokens."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for output in llm.generate(prompts, params, use_tqdm=False):
        _check_length(output.outputs[0].token_ids, tokens)


def _question(picture: Image.Image, seed: int) -> dict[str, Any]:
    """Return a prompt of a picture and 16 tokens of text that follow it."""
    text = np.random.default_rng(seed).integers(0, IMAGE, 16).tolist()
    return {"prompt_token_ids": [BEGIN, IMAGE, END, *text], "multi_modal_data": {"image": [picture]}}


def _engine(case: _Case, sequences: int) -> LLM:
    longest = case.patches // MERGE**2 + 64 + case.tokens
    return LLM(case.folder, dtype=case.dtype, max_model_len=longest, max_num_seqs=sequences)

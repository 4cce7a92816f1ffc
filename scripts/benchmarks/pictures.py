"""Measures what pictures cost a step: prompts of several at budgets of tokens, and the gaps of streams next to them."""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from jpaged import LLM, AsyncLLM, SamplingParams
from jpaged.memory import ImageFeatures
from jpaged.scheduling.held import KINDS
from jpaged.scheduling.held.images import ImageHolds
from jpaged.scheduling.step import ScheduledStep
from scripts.cases import Row, Rows

SIDE, MERGE = 16, 2
"""Pixels of a patch's side, and patches of a feature's."""
VOCABULARY, IMAGE, BEGIN, END = 8192, 8000, 8001, 8002
FIRST = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


class EncodesEachChunk(ImageHolds):
    """Holds of an engine without a cache of features: a picture is encoded for each chunk that has tokens of it."""

    def dispatched(self, step: ScheduledStep) -> None:
        super().dispatched(step)
        for read in step.rows.get(self.kind, ()):
            held = read.request.held[self.kind].pop(read.number, None)
            if held is not None:
                self.blocks.release(held)
            self.blocks.forget(read.image.digest)


def picture_chunks(
    budgets: list[int] = [512, 1024, 2048, 4096, 8192],  # noqa: B006
    pictures: int = 8,
    patches: int = 4096,
    text: list[int] = [512, 6],  # noqa: B006
    tower: list[int] = [384, 12],  # noqa: B006
    rounds: int = 3,
) -> Iterator[Row]:
    """Seconds to the first token of a prompt of pictures, chunked at so many tokens a step, with features that are kept
    until their tokens were computed and with a picture encoded for each chunk that has tokens of it.

    The model is a Qwen3-VL of random numbers; --text and --tower are widths and numbers of layers. "encoded" counts
    encoded pictures. "times" is the median of the rounds' ratios; the first round compiles and is left out.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_qwen(Path(folder), patches, text, tower)
        tokens = pictures * (patches // MERGE**2 + 2) + 8
        for budget in budgets:
            sides = {kept: _engine(folder, budget, tokens, kept) for kept in (True, False)}
            found: dict[bool, list[float]] = {kept: [] for kept in sides}
            encoded = dict.fromkeys(sides, 0)
            for turn in range(rounds + 1):
                prompt = prompt_of(*(drawn(patches, turn * pictures + n) for n in range(pictures)))
                for kept in list(sides)[:: 1 if turn % 2 else -1]:
                    before, start = sides[kept].stats().num_encoded_images, time.perf_counter()
                    sides[kept].generate(prompt, FIRST, use_tqdm=False)
                    found[kept].append(time.perf_counter() - start)
                    encoded[kept] = sides[kept].stats().num_encoded_images - before
            for llm in sides.values():
                llm.close()
            pairs = list(zip(found[False], found[True], strict=True))[1:]
            yield {
                "tokens a step": budget,
                "encoded": encoded[True],
                "each chunk": encoded[False],
                "seconds": statistics.median(own for _, own in pairs),
                "each chunk, seconds": statistics.median(other for other, _ in pairs),
                "times": statistics.median(other / own for other, own in pairs),
                "load": os.getloadavg()[0],
            }


def _engine(folder: str, budget: int, tokens: int, kept: bool) -> LLM:
    """Return an engine with an own kind of holds where features are not kept."""
    known = KINDS[ImageHolds.kind]
    KINDS[ImageHolds.kind] = known if kept else EncodesEachChunk
    try:
        return LLM(
            folder,
            max_num_batched_tokens=budget,
            max_num_seqs=1,
            max_model_len=tokens + 8,
            enable_prefix_caching=False,
            dtype="float32",
        )
    finally:
        KINDS[ImageHolds.kind] = known


def picture_gaps(
    streams: int = 8,
    budget: int = 512,
    patches: int = 4096,
    text: list[int] = [512, 6],  # noqa: B006
    tower: list[int] = [384, 12],  # noqa: B006
    rounds: int = 5,
) -> Rows:
    """The longest gap between two tokens of streams while a picture arrives, next to text that costs as much.

    The model is a Qwen3-VL of random numbers; --text and --tower are widths and numbers of layers. The text has as many
    tokens as the picture's tokens and its encoding count. "times" is the median of the rounds' ratios, the others are
    the medians of the rounds. The first round compiles and is left out.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_qwen(Path(folder), patches, text, tower)
        return asyncio.run(_gaps(folder, streams, budget, patches, rounds))


async def _gaps(folder: str, streams: int, budget: int, patches: int, rounds: int) -> Rows:
    ids = itertools.count()
    longest = 8 * patches
    settings: dict[str, Any] = {"max_num_seqs": streams + 1, "max_num_batched_tokens": budget, "dtype": "float32"}
    own = LLM(folder, max_model_len=longest, enable_prefix_caching=False, **settings)
    own.warmup(use_tqdm=False)
    policy = own.control.engine.memory.shared[ImageHolds.kind].policy
    assert isinstance(policy, ImageFeatures)
    llm = AsyncLLM.from_llm(own)
    as_text = int(patches // MERGE**2 + patches * policy.work)
    if as_text + 8 > longest:
        raise ValueError(
            f"--tower makes a patch cost {policy.work:.1f} tokens, and the limit is 7: give less, or more --text"
        )

    async def stream(stop: asyncio.Event, times: list[float]) -> None:
        params = SamplingParams(temperature=1.0, max_tokens=longest - 16, ignore_eos=True, seed=len(times))
        async for _ in llm.generate(prompt_of(), params, f"stream {next(ids)}"):
            times.append(time.perf_counter())
            if stop.is_set():
                return

    async def gap_next_to(prompt: dict[str, Any]) -> tuple[float, float]:
        """Return the longest gap of a stream, and the seconds that the prompt took."""
        stop = asyncio.Event()
        each: list[list[float]] = [[] for _ in range(streams)]
        running = [asyncio.create_task(stream(stop, times)) for times in each]
        while min(map(len, each)) < 4:
            await asyncio.sleep(0.01)
        begun = time.perf_counter()
        async for _ in llm.generate(prompt, FIRST, f"prompt {next(ids)}"):
            pass
        ended = time.perf_counter()
        await asyncio.sleep(0.2)
        stop.set()
        await asyncio.gather(*running)
        near = [np.array([t for t in times if t > begun - 0.5]) for times in each]
        gaps = [gap for times in near for gap, at in zip(np.diff(times), times[1:], strict=True) if at > begun]
        return max(gaps), ended - begun

    kinds = ("picture", "text")
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for turn in range(rounds + 1):
        for kind in kinds[:: 1 if turn % 2 else -1]:
            asked = prompt_of(drawn(patches, turn)) if kind == "picture" else prompt_of(text=as_text, seed=turn)
            found[kind].append(await gap_next_to(asked))
    await llm.shutdown()
    rows: Rows = []
    for kind in kinds:
        gaps, seconds = zip(*found[kind][1:], strict=True)
        times = statistics.median(
            own[0] / text[0] for own, text in zip(found[kind][1:], found["text"][1:], strict=True)
        )
        rows.append(
            {
                "streams": streams,
                "next to": kind,
                "tokens": as_text if kind == "text" else patches // MERGE**2,
                "longest gap ms": 1e3 * statistics.median(gaps),
                "seconds": statistics.median(seconds),
                "times": times,
            }
        )
    return rows


def drawn(patches: int, seed: int) -> Image.Image:
    """Return a picture of random pixels and so many patches, as near to a square as their number lets it be."""
    squares = patches // MERGE**2
    rows = next(rows for rows in range(int(squares**0.5), 0, -1) if squares % rows == 0)
    shape = rows * SIDE * MERGE, squares // rows * SIDE * MERGE, 3
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def prompt_of(*pictures: Image.Image, text: int = 8, seed: int = 0) -> dict[str, Any]:
    """Return a prompt of pictures and random text."""
    ids = np.random.default_rng(seed).integers(0, IMAGE, text).tolist()
    ids += [token for _ in pictures for token in (BEGIN, IMAGE, END)]
    return {"prompt_token_ids": ids, **({"multi_modal_data": {"image": list(pictures)}} if pictures else {})}


def write_qwen(folder: Path, patches: int, text: Sequence[int], tower: Sequence[int]) -> None:
    """Write a Qwen3-VL of random numbers, whose pictures have at most so many patches.

    Args:
        text, tower: width and number of layers.
    """
    import torch
    from transformers import Qwen2VLImageProcessorPil, Qwen3VLConfig, Qwen3VLForConditionalGeneration

    own = {
        "vocab_size": VOCABULARY,
        "hidden_size": text[0],
        "intermediate_size": 3 * text[0],
        "num_hidden_layers": text[1],
        "num_attention_heads": text[0] // 64,
        "num_key_value_heads": max(1, text[0] // 128),
        "head_dim": 64,
        "max_position_embeddings": 1 << 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [12, 10, 10],
            "mrope_interleaved": True,
        },
    }
    eyes = {
        "depth": tower[1],
        "hidden_size": tower[0],
        "intermediate_size": 4 * tower[0],
        "num_heads": tower[0] // 64,
        "patch_size": SIDE,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": text[0],
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [tower[1] // 4, tower[1] // 2],
    }
    config = Qwen3VLConfig(
        text_config=own,
        vision_config=eyes,
        image_token_id=IMAGE,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
        video_token_id=END + 1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
    size = {"shortest_edge": (SIDE * MERGE) ** 2, "longest_edge": patches * SIDE**2}
    Qwen2VLImageProcessorPil(patch_size=SIDE, merge_size=MERGE, temporal_patch_size=2, size=size).save_pretrained(
        folder
    )

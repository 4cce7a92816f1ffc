"""Trains a SmolVLM of two million parameters to read numbers in pictures, and has jpaged read some that it never saw.

    python -m scripts.reader                                    twenty minutes on two cores; writes the folder reader
    python -m scripts.reader --folder reader --steps 0          reads with the model of a folder

It needs torch and `jpaged[images]`. The folder is one of Hugging Face's: weights, config, tokenizer with its chat
template, image processor. The numbers that are asked for at the end are in no picture of the training. Each is asked
for twice, with its own picture and with that of another number: then an answer can be right by chance only.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessorPil,
)
from transformers.utils import logging

from jpaged import LLM, SamplingParams

SIDE, PATCH, SHUFFLE = 64, 8, 2
"""Pixels of a tile's side and of a patch's, and patches of a feature's side."""
TOWER = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
TEXT = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 6}
SCALING: dict[str, Any] = {"image_mean": [0.7] * 3, "image_std": [0.25] * 3}
"""Mean and deviation of the pictures, which are mostly paper. With SigLIP's 0.5 its grey would drown the digits."""
INITIAL = {"initializer_range": 0.06}
"""Nearer to the inverse root of these narrow widths than 0.02, which is for ten times as wide ones."""
QUESTIONS = ("Which number is this?", "What number do you see?", "Read the number.", "What does the picture say?")
START, END, IMAGE, AROUND, WHOLE = MARKS = (
    "<|im_start|>",
    "<end_of_utterance>",
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
)
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}:"
    "{% if message['content'] is string %} {{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %} {{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


@lru_cache
def unseen() -> tuple[int, ...]:
    """Return the 1,000 numbers of three and four digits that are never learned."""
    return tuple(int(number) for number in np.random.default_rng(0).permutation(np.arange(100, 10_000))[:1000])


def learned(count: int, rng: np.random.Generator) -> list[int]:
    """Draw numbers of one to four digits, mostly long ones and none of them `unseen`."""
    digits, left_out = rng.choice(4, 2 * count, p=(0.1, 0.1, 0.3, 0.5)), frozenset(unseen())
    drawn = rng.integers(np.where(digits == 0, 0, 10**digits), 10 ** (digits + 1))
    return [number for number in drawn.tolist() if number not in left_out][:count]


@lru_cache
def _font(size: int) -> Any:
    return ImageFont.load_default(size)


def draw(number: int, rng: np.random.Generator, spread: float = 1.0) -> Image.Image:
    """Return a picture of a number in Pillow's own font.

    Args:
        spread: how far size, place, greys and noise are drawn from those of a plain picture, whose number is in its
            middle, dark on light; 0 = it is that one.
    """
    text = str(number)

    def between(low: float, high: float) -> float:
        return (low + high) / 2 + spread * rng.uniform(-0.5, 0.5) * (high - low)

    font = _font(int(SIDE * between(0.24, 0.4)))
    left, top, right, bottom = font.getbbox(text)
    x, y = round((SIDE - right + left) * between(0, 1)), round((SIDE - bottom + top) * between(0.2, 0.8))
    image = Image.new("L", (SIDE, SIDE), int(between(150, 255)))
    ImageDraw.Draw(image).text((x - left, y - top), text, fill=int(between(0, 90)), font=font)
    noisy = np.asarray(image) + rng.normal(0, spread * rng.uniform(0, 10), (SIDE, SIDE))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).convert("RGB")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of any text, to which each digit is a token."""
    inner = Tokenizer(models.BPE())
    by_digit = pre_tokenizers.Digits(individual_digits=True)
    inner.pre_tokenizer = pre_tokenizers.Sequence([by_digit, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    inner.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=list(MARKS), initial_alphabet=letters, show_progress=False)
    inner.train_from_iterator([f"User: {text}\nAssistant:" for text in 2 * QUESTIONS], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, pad_token=END, chat_template=TEMPLATE)


class Reader(NamedTuple):
    """A model and what else its folder holds."""

    model: Any
    tokenizer: PreTrainedTokenizerFast
    processor: SmolVLMImageProcessorPil

    def save(self, folder: str | Path) -> None:
        """Write the folder that `LLM` opens."""
        for part in self:
            part.save_pretrained(folder)


def make(seed: int = 0) -> Reader:
    """Return a model that cannot read yet."""
    torch.manual_seed(seed)
    tokenizer, whole = make_tokenizer(), {"longest_edge": SIDE}
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    text = {"model_type": "llama", "vocab_size": len(tokenizer), "max_position_embeddings": 1024}
    config = SmolVLMConfig(
        vision_config=TOWER | INITIAL | {"image_size": SIDE, "patch_size": PATCH},
        text_config=TEXT | INITIAL | text | ends,
        scale_factor=SHUFFLE,
        image_token_id=tokenizer.vocab[IMAGE],
    )
    model = SmolVLMForConditionalGeneration(config)
    model.generation_config = GenerationConfig(**ends)
    processor = SmolVLMImageProcessorPil(size=whole, max_image_size=whole, do_image_splitting=False, **SCALING)
    return Reader(model, tokenizer, processor)


def question(picture: Image.Image | None, text: str = QUESTIONS[0]) -> list[dict[str, Any]]:
    """Return the conversation that asks about a picture; None = its place in a template."""
    shown = {"type": "image"} if picture is None else {"type": "image_pil", "image_pil": picture}
    return [{"role": "user", "content": [shown, {"type": "text", "text": text}]}]


def batch_of(
    reader: Reader, numbers: Sequence[int], text: str, rng: np.random.Generator, spread: float = 1.0
) -> dict[str, torch.Tensor]:
    """Return the model's arguments: a picture of each number, a question, and the answers as labels."""
    drawn = np.stack([np.asarray(draw(number, rng, spread)) for number in numbers])
    # As the processor makes them, which takes longer than a step: they have its size already.
    pixels = (drawn.astype(np.float32) / 255 - SCALING["image_mean"]) / SCALING["image_std"]
    asked = reader.tokenizer.apply_chat_template(question(None, text), tokenize=False, add_generation_prompt=True)
    features = IMAGE * (SIDE // PATCH // SHUFFLE) ** 2
    prompt = reader.tokenizer.encode(asked.replace(IMAGE, f"{AROUND}{WHOLE}{features}{AROUND}"))
    answers = [reader.tokenizer.encode(f"{number}{END}") for number in numbers]
    longest = max(map(len, answers))
    ids = [prompt + answer + [reader.tokenizer.pad_token_id] * (longest - len(answer)) for answer in answers]
    labels = [[-100] * len(prompt) + answer + [-100] * (longest - len(answer)) for answer in answers]
    values = torch.tensor(pixels.transpose(0, 3, 1, 2)[:, None], dtype=torch.float32)
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels), "pixel_values": values}


def train(reader: Reader, steps: int, minutes: float = 60, batch: int = 32, rate: float = 1.5e-3) -> Iterator[float]:
    """Take steps of AdamW and yield each one's loss.

    The pictures are plain at first and spread with each step whose loss is low, at three quarters in any case: from the
    start spread pictures teach a tower of this size nothing for long. The rate falls by a cosine, to 0 at the last step
    or, where that comes first, after so many minutes.
    """
    rng, started, spread = np.random.default_rng(1), time.monotonic(), 0.0
    optimiser = torch.optim.AdamW(reader.model.parameters(), betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    reader.model.train()
    for step in range(steps):
        done = max(step / steps, (time.monotonic() - started) / 60 / max(minutes, 1e-9))
        if done >= 1:
            break
        optimiser.param_groups[0]["lr"] = rate * min(1, (step + 1) / 100) * (1 + math.cos(math.pi * done)) / 2
        text = QUESTIONS[step % len(QUESTIONS)]
        loss = reader.model(**batch_of(reader, learned(batch, rng), text, rng, spread)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reader.model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        spread = min(1.0, max(spread + 0.01 * (loss.item() < 0.5), 2 * done - 0.5))
        yield loss.item()
    reader.model.eval()


def read(llm: LLM, pictures: Sequence[Image.Image], text: str = QUESTIONS[0]) -> list[str]:
    """Return what jpaged answers to a question about each picture."""
    greedy = SamplingParams(temperature=0, max_tokens=8)
    outputs = llm.chat([question(picture, text) for picture in pictures], greedy, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


class Score(NamedTuple):
    """Parts of the numbers, and of their digits, that answers have right."""

    numbers: float
    digits: float

    @classmethod
    def of(cls, answers: Sequence[str], numbers: Sequence[int]) -> Score:
        """Compare answers with numbers, digit by digit from the first."""
        pairs = [(answer, str(number)) for answer, number in zip(answers, numbers, strict=True)]
        digits = [answer[place : place + 1] == digit for answer, text in pairs for place, digit in enumerate(text)]
        return cls(float(np.mean([answer == text for answer, text in pairs])), float(np.mean(digits)))


def scores(llm: LLM, count: int = 1000) -> tuple[Score, Score]:
    """Ask for `unseen` numbers, with their own pictures and with each other's."""
    numbers, rng = unseen()[:count], np.random.default_rng(2)
    pictures = [draw(number, rng) for number in numbers]
    swapped = pictures[1:] + pictures[:1]
    return Score.of(read(llm, pictures), numbers), Score.of(read(llm, swapped), numbers)


def opened(folder: str | Path) -> LLM:
    """Return an engine of the folder."""
    return LLM(str(folder), dtype="float32", max_model_len=64, max_num_seqs=16, kv_cache_memory_bytes=64 << 20)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="reader", help="where the model is written")
    parser.add_argument(
        "--steps", type=int, default=4000, help="most steps of training; 0 reads with the folder's model"
    )
    parser.add_argument("--minutes", type=float, default=20, help="most minutes of training")
    parser.add_argument("--numbers", type=int, default=1000, help="how many unseen numbers are asked for")
    given = parser.parse_args(arguments)
    logging.disable_progress_bar()
    if given.steps:
        reader, started, spent, losses = make(), time.monotonic(), time.process_time(), []
        print(f"{reader.model.num_parameters():,} parameters", flush=True)
        for loss in train(reader, given.steps, given.minutes):
            losses.append(loss)
            if len(losses) % 100 == 0:
                minutes = [
                    (now - then) / 60 for now, then in ((time.monotonic(), started), (time.process_time(), spent))
                ]
                print(
                    f"step {len(losses)}: loss {np.mean(losses[-100:]):.4f}, minutes {minutes[0]:.1f}, "
                    f"of processors {minutes[1]:.1f}",
                    flush=True,
                )
        reader.save(given.folder)
    with opened(given.folder) as llm:
        own, swapped = scores(llm, given.numbers)
    for name, found in (("their own", own), ("each other's", swapped)):
        print(f"unseen numbers with {name} pictures: {found.numbers:.1%} read, {found.digits:.1%} of the digits")


if __name__ == "__main__":
    main()

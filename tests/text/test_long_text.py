"""Long texts: the same tokens as of the whole text, or a refusal, after work that depends on the limit alone."""

import random
import string

import pytest
from kinds_of_tokenizers import TOKENIZERS, cached
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from jpaged.sampling_params import SamplingParams
from jpaged.text.input_processor import InputProcessor
from jpaged.text.long_text import MOST_UNCUT, SLACK, TokenBound, encode_bounded
from jpaged.text.prompt import Tokenization

WORDS = ["the", "cab", "a", "Ünder", "naïve", "日本", "don't", "12", "x=1", "(b)", "...", "é", "  ", "\n", "\n\n", " "]


def text_of(rng, length):
    """Words, spaces and lines at random."""
    parts, size = [], 0
    while size < length:
        parts.append(rng.choice(WORDS) + rng.choice([" ", " ", " ", "\n", ""]))
        size += len(parts[-1])
    return "".join(parts)[:length]


class Counting:
    """A tokenizer that counts the characters that it is given."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.characters = 0

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def encode(self, text, **options):
        self.characters += len(text)
        return self._tokenizer.encode(text, **options)

    def __call__(self, text, **options):
        self.characters += len(text)
        return self._tokenizer(text, **options)


def merging(*, splits, prefix):
    """A tokenizer of merged pairs, which splits words as GPT-2's does, or nowhere, as Llama 2's does."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    if splits:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        replaced = normalizers.Replace(" ", "▁")
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replaced]) if prefix else replaced
        alphabet = list("▁\n" + string.printable)
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=alphabet)
    rng = random.Random(0)
    lines = [line for line in text_of(rng, 30_000).split("\n") for line in ([line] if splits else line.split(" "))]
    backend.train_from_iterator(lines, trainer)
    backend.post_processor = TemplateProcessing(
        single="<s> $A </s>",
        special_tokens=[("<s>", backend.token_to_id("<s>")), ("</s>", backend.token_to_id("</s>"))],
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend)


MERGING = {f"{splits} {prefix}": (splits, prefix) for splits in (True, False) for prefix in (True, False)}


@pytest.fixture(scope="module", params=[*TOKENIZERS, *MERGING])
def tokenizer(request):
    if request.param in MERGING:
        splits, prefix = MERGING[request.param]
        return merging(splits=splits, prefix=prefix)
    return cached(request.param)


@pytest.mark.parametrize("special", [True, False])
def test_the_last_tokens_are_those_of_the_whole_text(tokenizer, special):
    rng = random.Random(1)
    for last in (1, 7, 100):
        for length in (10, 1500, 6000, 20_000):
            text = text_of(rng, length)
            whole = tokenizer.encode(text, add_special_tokens=special)
            found = encode_bounded(tokenizer, text, special, TokenBound(1000, last=last))
            assert found[-last:] == whole[-last:], (last, length)


@pytest.mark.parametrize("name", MERGING)
def test_the_end_of_a_long_text_costs_what_its_tokens_do(name):
    splits, prefix = MERGING[name]
    counting = Counting(merging(splits=splits, prefix=prefix))
    text = text_of(random.Random(2), 500_000)
    found = encode_bounded(counting, text, True, TokenBound(1000, last=50))
    assert len(found) >= 50 and counting.characters < 20_000


@pytest.mark.parametrize("piece", ["a", "the cab ", "\n", " ", "日本", "é\n", "1", "."])
def test_a_text_far_above_the_limit_is_refused_after_its_first_windows(piece):
    counting = Counting(cached("demo"))
    text = piece * (4 * 2**20 // len(piece))
    said = rf"the prompt has {len(text)} characters, of which the first \d+ have \d+ tokens, more than max_model_len=64"
    with pytest.raises(ValueError, match=said):
        encode_bounded(counting, text, True, TokenBound(64))
    assert counting.characters < 600 * (64 + SLACK)


def test_a_text_about_as_long_as_the_limit_is_tokenized_whole(tokenizer):
    rng = random.Random(3)
    for length in (0, 1, 1000, 1280, 1281, 2000):
        text = text_of(rng, length)
        whole = tokenizer.encode(text)
        if len(whole) <= 64 + SLACK:
            assert encode_bounded(tokenizer, text, True, TokenBound(64)) == whole


def test_a_text_with_nowhere_to_cut_is_refused_or_tokenized_whole():
    counting = Counting(cached("demo"))
    text = "a" * 20_001
    assert encode_bounded(counting, text, True, TokenBound(64, last=8)) == counting.encode(text)
    with pytest.raises(ValueError, match=f"{MOST_UNCUT} characters"):
        encode_bounded(counting, "a" * (MOST_UNCUT + 1), True, TokenBound(64, last=8))


@pytest.fixture
def inputs():
    tokenizer = merging(splits=True, prefix=False)
    return InputProcessor(tokenizer, vocab_size=len(tokenizer), max_model_len=64, max_num_seqs=4)


def test_requests_refuse_long_texts_and_cut_them_on_the_left(inputs):
    text = text_of(random.Random(4), 300_000)
    whole = inputs.tokenizer.encode(text)
    inputs.tokenizer = Counting(inputs.tokenizer)
    for cut, count in ((5, 5), (-1, 48)):
        params = SamplingParams(max_tokens=16, truncate_prompt_tokens=cut)
        assert inputs.process(text, params).prompt_token_ids == whole[-count:]
    cut = Tokenization.of({"truncation": True, "max_length": 20})
    assert inputs.process(text, SamplingParams(), tokenization=cut).prompt_token_ids == whole[-20:]
    with pytest.raises(ValueError, match="max_model_len=64"):
        inputs.process(text, SamplingParams())
    with pytest.raises(ValueError, match="max_model_len=64"):
        inputs.process({"prompt": text}, SamplingParams(truncate_prompt_tokens=65))
    assert inputs.tokenizer.characters < len(text) / 10

"""The tokenizer without transformers gives the same as transformers' of the same parts."""

import itertools
import random
import sys
import threading

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jpaged.text.detokenizer import cleans_up
from jpaged.text.tokenizer import Tokenizer

WORDS = ["[UNK]", "[CLS]", "[SEP]", "a", "b", "c", ".", "n't", "'m"]
SPECIAL = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "image_token": "<i>"}


def backend() -> Backend:
    made = Backend(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    made.enable_truncation(2)
    made.enable_padding(length=64)
    return made


def both(**options):
    return Tokenizer(
        backend(), special_tokens=SPECIAL, extra_special_tokens=["<x>"], **options
    ), PreTrainedTokenizerFast(tokenizer_object=backend(), **SPECIAL, extra_special_tokens=["<x>"])


def test_special_tokens_are_added_and_named_as_by_transformers():
    own, reference = both()
    assert own.get_vocab() == reference.get_vocab()
    assert len(own) == len(reference) == len(WORDS) + 3
    assert own.all_special_tokens == reference.all_special_tokens
    assert own.all_special_ids == reference.all_special_ids
    assert own.special_tokens_map == reference.special_tokens_map
    assert own.added_tokens_decoder.keys() == reference.added_tokens_decoder.keys()
    for role in ("bos_token", "eos_token", "unk_token", "pad_token"):
        assert getattr(own, role) == getattr(reference, role)
        assert getattr(own, f"{role}_id") == getattr(reference, f"{role}_id")
    assert own.convert_tokens_to_ids(["a", "no token", "<x>"]) == reference.convert_tokens_to_ids(
        ["a", "no token", "<x>"]
    )
    assert own.convert_ids_to_tokens([3, 9]) == reference.convert_ids_to_tokens([3, 9])
    assert own.convert_ids_to_tokens(10**6) is None


def test_pairs_are_cut_as_by_transformers_whatever_their_lengths():
    for side in ("right", "left"):
        own, reference = both(truncation_side=side)
        reference.truncation_side = side
        options = {"truncation": True, "return_token_type_ids": True, "return_offsets_mapping": True}
        for first, second, most in itertools.product(range(6), range(6), range(3, 13)):
            texts = " ".join("abc"[i % 3] for i in range(first)), " ".join("cba"[i % 3] for i in range(second))
            found, expected = own(*texts, max_length=most, **options), reference(*texts, max_length=most, **options)
            assert found == {name: expected[name] for name in found}, (first, second, most)
            plain = own(texts[0], max_length=most, truncation=True, add_special_tokens=False)["input_ids"]
            assert plain == reference.encode(texts[0], max_length=most, truncation=True, add_special_tokens=False)
    assert len(own.encode("a " * 100)) == 102  # neither a cut nor the backend's own truncation is left


def test_a_length_without_place_for_the_tokens_around_a_text_is_refused():
    own, _ = both()
    with pytest.raises(ValueError, match="max_length=1 has no place for the 2 tokens around a text"):
        own("a", truncation=True, max_length=1)
    for wrong in ({"truncation": True}, {"max_length": 3}):
        with pytest.raises(ValueError, match="a cut needs both"):
            own("a", **wrong)


def test_ids_become_the_text_that_transformers_makes_of_them():
    rng = random.Random(0)
    for cleans in (False, True):
        own = Tokenizer(backend(), special_tokens=SPECIAL, clean_up=cleans)
        reference = PreTrainedTokenizerFast(tokenizer_object=backend(), **SPECIAL, clean_up_tokenization_spaces=cleans)
        assert cleans_up(own) == cleans_up(reference) == cleans
        for _ in range(50):
            ids = [rng.randrange(len(own)) for _ in range(rng.randrange(9))]
            for skips in (False, True):
                assert own.decode(ids, skip_special_tokens=skips) == reference.decode(ids, skip_special_tokens=skips)
    assert own.decode(3) == "a"
    with pytest.raises(TypeError, match="takes no clean_up_tokenization_spaces"):
        own.decode([3], clean_up_tokenization_spaces=False)


def test_a_template_is_chosen_by_name_and_by_whether_there_are_tools():
    own, _ = both(chat_template={"default": "plain", "tool_use": "with tools", "other": "{{ messages[0].content }}"})
    talk = [{"role": "user", "content": "hi"}]
    assert own.apply_chat_template(talk) == "plain"
    assert own.apply_chat_template(talk, tools=[{}]) == "with tools"
    assert own.apply_chat_template(talk, chat_template="other") == "hi"
    assert own.apply_chat_template(talk, chat_template="{{ image_token }}{{ x }}", x=1) == "<i>1"
    own.chat_template = {"other": ""}
    with pytest.raises(ValueError, match=r"the chat templates \['other'\] and none of them is the default"):
        own.apply_chat_template(talk)
    own.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        own.apply_chat_template(talk)


def test_what_a_template_cannot_do_is_refused():
    own, _ = both(chat_template="x")
    with pytest.raises(ValueError, match="has no message; at least 1"):
        own.apply_chat_template([])
    with pytest.raises(ValueError, match="exclude each other"):
        own.apply_chat_template([{}], add_generation_prompt=True, continue_final_message=True)
    with pytest.raises(ValueError, match="tokenize=True is not supported"):
        own.apply_chat_template([{}], tokenize=True)


@pytest.mark.parametrize("how", ["alone", "in a pair", "cut"])
def test_other_threads_run_while_a_long_text_is_encoded(how):
    own, reference = both()
    text, ran, seen = "a b c " * 2**15, threading.Event(), []
    options = {"max_length": 100, "truncation": True} if how == "cut" else {}
    started = threading.Event()

    def encode():
        started.set()
        found = own.encode(text) if how == "alone" else own(text, "a b", **options)["input_ids"]
        seen.append((ran.is_set(), found))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # a thread goes on until it gives the lock up by itself
    try:
        thread = threading.Thread(target=encode)
        thread.start()
        started.wait()
        ran.set()
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    ((meanwhile, found),) = seen
    assert meanwhile
    reference.backend_tokenizer.no_truncation()
    assert found == (reference.encode(text) if how == "alone" else reference(text, "a b", **options)["input_ids"])

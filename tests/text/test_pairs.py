"""Two texts become one prompt as their tokenizer joins them."""

from __future__ import annotations

import pytest
import tiny_chat_model
from tokenizers.processors import TemplateProcessing

from jpaged.text.prompt import pair_prompts
from jpaged.text.prompt import DEFAULT, Tokenization


@pytest.fixture(scope="module")
def tokenizer():
    made = tiny_chat_model.tokenizer()
    ids = [("<s>", made.bos_token_id), ("</s>", made.eos_token_id)]
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A </s> $B </s>", special_tokens=ids
    )
    return made


def test_texts_are_joined_by_the_tokenizer(tokenizer):
    (one, other) = pair_prompts(["the cab", {"prompt": "far"}], ["is far", "off"], tokenizer, DEFAULT)
    assert tokenizer.decode(one["prompt_token_ids"]) == "<s>the cab</s>is far</s>"
    assert tokenizer.decode(other["prompt_token_ids"]) == "<s>far</s>off</s>"
    (plain,) = pair_prompts(["the cab"], ["is far"], tokenizer, Tokenization(add_special_tokens=False))
    assert tokenizer.decode(plain["prompt_token_ids"]) == "the cabis far"


@pytest.mark.parametrize("prompt", [[5, 6], {"prompt_token_ids": [5]}, {"prompt": "a", "cache_salt": "b"}, None])
def test_what_is_no_text_is_refused_by_its_place(tokenizer, prompt):
    with pytest.raises(ValueError, match=r"data_2\[1\]=.* must be text: this model reads both texts of a pair as one"):
        pair_prompts(["a", "b"], ["c", prompt], tokenizer, DEFAULT)
    with pytest.raises(ValueError, match=r"data_1\[0\]=.* is not Unicode text"):
        pair_prompts(["\ud800"], ["c"], tokenizer, DEFAULT)
    with pytest.raises(ValueError, match="the model has no tokenizer, which joins the texts of a pair"):
        pair_prompts(["a"], ["b"], None, DEFAULT)

"""Pairs become the question that a reranker was trained on: by its template, or as Qwen3-Reranker's card has it."""

import pytest
import tiny_chat_model
from tokenizers import Tokenizer, models

from jpaged.text.long_text import TokenBound
from jpaged.text.pairs import judged_prompts, pair_prompts
from jpaged.text.prompt import DEFAULT, Tokenization
from jpaged.text.tokenizer import Tokenizer as OwnTokenizer

BY_ROLE = (
    "{% for m in messages %}<s>{{ m.role }}={{ m.content }}{% endfor %}{{ '!' if add_generation_prompt }}{{ more }}"
)
IN_PARTS = "{% for m in messages %}<s>{{ m.role }}={{ m.content[0].text }}{% endfor %}"
ONLY_USERS = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"


def tokenizer(template, *tokens):
    made = tiny_chat_model.tokenizer()
    made.add_special_tokens({"additional_special_tokens": list(tokens)})
    made.chat_template = template
    return made


def shown(made, first=("ab",), second=("cd e",), **options):
    found = judged_prompts(
        first, second, made, DEFAULT, **{"most": 2000, "names": [f"data_2[{i}]" for i in range(len(first))], **options}
    )
    return [made.decode(one["prompt_token_ids"]) for one in found]


def test_both_texts_are_messages_of_their_own_roles():
    made = tokenizer(BY_ROLE)
    assert shown(made) == ["<s>query=ab<s>document=cd e!"]
    assert shown(made, ["a", "b"], ["c", "d"], instruction="be fair", add_generation_prompt=False) == [
        "<s>system=be fair<s>query=a<s>document=c",
        "<s>system=be fair<s>query=b<s>document=d",
    ]
    assert shown(made, variables={"more": "?"}) == ["<s>query=ab<s>document=cd e!?"]


def test_a_template_may_take_parts():
    assert shown(tokenizer(IN_PARTS)) == ["<s>query=ab<s>document=cd e"]


@pytest.mark.parametrize("template", [ONLY_USERS, None])
@pytest.mark.parametrize("instruction", [None, "Find it."])
def test_without_such_a_template_the_prompt_is_that_of_qwen3_reranker(template, instruction):
    made = tokenizer(template, "<|im_start|>", "<|im_end|>")
    instruct = instruction or "Given a web search query, retrieve relevant passages that answer the query"
    assert shown(made, instruction=instruction) == [
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        f"<Instruct>: {instruct}\n<Query>: ab\n<Document>: cd e<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n".replace("\n", "")
    ]


def test_a_tokenizer_without_any_such_template_is_refused():
    with pytest.raises(ValueError, match="shows no messages of the roles 'query' and 'document'"):
        shown(tokenizer(ONLY_USERS))
    with pytest.raises(ValueError, match="no tokenizer"):
        shown(None)


def test_a_question_is_never_cut():
    made = tokenizer(BY_ROLE)
    with pytest.raises(ValueError, match=r"data_2\[1\]: the prompt has \d+ tokens, above the limit of 24 for a pair"):
        shown(made, ["a", "a"], ["b", "b 1 c " * 5], most=24)
    with pytest.raises(ValueError, match="max_length=9: a reranker's prompt is not cut"):
        judged_prompts(["a"], ["b"], made, Tokenization(max_length=9), most=24, names=["data_2"])


def test_a_salt_of_the_first_text_is_kept():
    (one,) = judged_prompts(
        [{"prompt": "a", "cache_salt": "x"}], ["b"], tokenizer(BY_ROLE), DEFAULT, most=99, names=["data_2"]
    )
    assert one["cache_salt"] == "x"


@pytest.mark.parametrize(
    ("names", "apart"), [(["input_ids", "token_type_ids"], True), (["input_ids"], False), (None, True)]
)
def test_the_second_text_is_told_apart_unless_the_tokenizers_files_leave_types_out(names, apart):
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    made = OwnTokenizer(backend, special_tokens={"unk_token": "[UNK]"}, model_input_names=names)
    bound = TokenBound(9)
    (pair,) = pair_prompts(["a"], ["b"], made, DEFAULT, vocab_size=100, token_types=2, bound=bound, names=["data_2"])
    assert pair["prompt_token_ids"] == [1, 102 if apart else 2]

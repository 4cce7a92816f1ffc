"""One tiny chat model for the tests that serve one: the folder it lies in, and an engine that holds it."""

import pytest
from live_server import make_llm
from tiny_chat_model import byte_level_tokenizer, make_chat_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served-model")
    make_chat_model(folder)
    byte_level_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_llm(tiny_folder):
    return make_llm(tiny_folder)

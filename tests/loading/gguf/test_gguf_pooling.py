"""A GGUF file of an embedding model says how prompts become vectors."""

import pytest
from gguf.constants import PoolingType
from gguf_files import EMBEDDING, write_gguf

from jpaged.loading.open_checkpoint import open_model
from jpaged.loading.pooling_head import PoolingHead, read_pooling_head


def pooling_of(folder, **extra):
    opened = open_model(write_gguf(folder / "m.gguf", "qwen3", EMBEDDING, extra))
    return read_pooling_head(opened.source, opened.reader, opened.config)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (PoolingType.NONE, PoolingHead()),
        (PoolingType.MEAN, PoolingHead("mean")),
        (PoolingType.LAST, PoolingHead("last")),
        (PoolingType.CLS, PoolingHead("cls")),
        (PoolingType.RANK, PoolingHead(unknown="rank")),
        (9, PoolingHead(unknown="9")),
    ],
)
def test_the_files_pooling_type_is_the_default(tmp_path, kind, expected):
    assert pooling_of(tmp_path, **{"qwen3.pooling_type": int(kind)}) == expected


def test_a_file_that_says_nothing_of_pooling_gives_the_last_tokens_vector(tmp_path):
    assert pooling_of(tmp_path) == PoolingHead()

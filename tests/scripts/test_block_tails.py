"""Counts of what hits lose that end where blocks end."""

from __future__ import annotations

import json

import pytest

from scripts.benchmarks.block_tails import block_tails, lost, shared_tokens


def test_a_prompt_shares_what_any_earlier_prompt_and_its_answer_begin_with():
    served = [([1, 2, 3], [9]), ([1, 2, 3, 9, 5], []), ([1, 2, 7, 7], []), ([1, 2, 3], []), ([4], [])]
    assert shared_tokens(served) == [(3, 0), (5, 4), (4, 2), (3, 2), (1, 0)], "the last token is computed"


def test_hits_at_blocks_lose_what_lies_after_their_last_one():
    assert lost([(10, 0), (10, 9)], 4) == {"at blocks": 0.4, "anywhere": 0.45, "computed": 1 / 12}


def test_texts_are_read_in_order(tmp_path):
    path = tmp_path / "asked.jsonl"
    lines = [{"prompt": "a b c", "output": " d"}, {"prompt": "a b c d e"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row,) = block_tails([], [path], [1])
    assert row["load"] == "asked" and row["at blocks"] == row["anywhere"] == 4 / 8


def test_an_unknown_load_is_refused():
    with pytest.raises(ValueError, match="loads=\\['talks'\\] are none of"):
        list(block_tails(["talks"]))

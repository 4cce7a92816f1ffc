"""Makes the masks along given texts with xgrammar and times them. Runs in an environment with xgrammar.

Reads one JSON from standard input: "vocabulary" (the tokens' texts by id, bytes as in byte-level BPE), "eos", and
"cases", each with "json" or "regex" and "texts", lists of tokens. Writes for each case "compile" (processor seconds)
and for each text "seconds" (of this thread, one a mask) and "allowed" (how many tokens each mask allows).
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import xgrammar

asked = json.load(sys.stdin)
vocabulary: list[str] = asked["vocabulary"]
info = xgrammar.TokenizerInfo(
    vocabulary, xgrammar.VocabType.BYTE_LEVEL, vocab_size=len(vocabulary), stop_token_ids=[asked["eos"]]
)
mask = xgrammar.allocate_token_bitmask(1, len(vocabulary))
words = mask.numpy()[0].view(np.uint32)
found: list[dict[str, Any]] = []
for case in asked["cases"]:
    compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)
    start = time.process_time()
    if "json" in case:
        compiled = compiler.compile_json_schema(json.dumps(case["json"]))
    else:
        compiled = compiler.compile_regex(case["regex"])
    answer: dict[str, Any] = {"compile": time.process_time() - start, "texts": []}
    for text in case["texts"]:
        matcher = xgrammar.GrammarMatcher(compiled)
        seconds, allowed = [], []
        for token in text:
            words.fill(2**32 - 1)  # a mask that allows everything is not written
            start = time.thread_time()
            matcher.fill_next_token_bitmask(mask)
            seconds.append(time.thread_time() - start)
            allowed.append(int(np.bitwise_count(words).sum()))
            if not matcher.accept_token(token):
                raise SystemExit(f"{case['name']}: {vocabulary[token]!r} is refused at {len(seconds)}")
        answer["texts"].append({"seconds": seconds, "allowed": allowed})
    found.append(answer)
print(json.dumps(found))

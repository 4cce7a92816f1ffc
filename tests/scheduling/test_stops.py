"""Which token ends a sequence, and what is said about it."""

from __future__ import annotations

import pytest
from small_schedulers import make_request

from jpaged.scheduling.request import token_stop

CASES = [
    # generated, max_tokens, eos, parameters, expected
    ([4], 3, [9], {}, None),
    ([9], 3, [9], {}, ("stop", None)),
    ([9], 3, [9], {"ignore_eos": True}, None),
    ([9], 3, [9], {"ignore_eos": True, "stop_token_ids": [9]}, ("stop", 9)),
    ([9], 3, [9], {"stop_token_ids": [9]}, ("stop", None)),
    ([7], 3, [9], {"stop_token_ids": [7]}, ("stop", 7)),
    ([4, 4, 4], 3, [9], {}, ("length", None)),
    ([4, 4, 9], 3, [9], {}, ("stop", None)),
    ([9], 3, [9], {"min_tokens": 2}, None),
    ([9, 9], 3, [9], {"min_tokens": 2}, ("stop", None)),
    ([7, 7, 7], 3, [9], {"min_tokens": 3, "stop_token_ids": [7]}, ("stop", 7)),
    ([9, 4], 3, [9], {}, None),
]


@pytest.mark.parametrize(("generated", "max_tokens", "eos", "parameters", "expected"), CASES)
def test_the_newest_token_decides(generated, max_tokens, eos, parameters, expected):
    request = make_request([9, 7], max_tokens, eos=eos, **parameters)
    seq = request.sequences[0]
    seq.token_ids += generated
    assert token_stop(request, seq) == expected

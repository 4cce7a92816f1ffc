"""Says which tensors of a checkpoint no parameter was made from."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from jpaged.loading.readers import TensorReader
from jpaged.loading.targets import Target

logger = logging.getLogger(__name__)


def warn_of_unread(reader: TensorReader, places: Iterable[Target]) -> None:
    """Reports tensors nobody read, except those that repeat what the config or, tied, the embedding says."""
    used = {name for target in places for name in target.source.sources}
    repeated = ("rotary_emb.inv_freq", "lm_head.weight")
    unread = [name for name in reader.names() if name not in used and not name.endswith(repeated)]
    if unread:
        first = ", ".join(unread[:5])
        logger.warning("%s: %d tensors were not used, first: %s", reader.location, len(unread), first)

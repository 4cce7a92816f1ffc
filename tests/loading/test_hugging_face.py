import logging

import pytest

from jpaged.loading.hugging_face import without_lines


def test_only_the_lines_that_are_named_are_dropped_and_only_within(caplog):
    logger = logging.getLogger("somebody")
    with pytest.raises(ZeroDivisionError), without_lines("somebody", "no merge"):
        logger.warning("there is %s here", "no merge")
        logger.warning("the disk is full")
        raise ZeroDivisionError
    logger.warning("no merge")
    assert caplog.messages == ["the disk is full", "no merge"]

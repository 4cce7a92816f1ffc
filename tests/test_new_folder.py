"""A new folder appears whole or not at all, whatever another process writes at the same time."""

import pytest

from jpaged.new_folder import new_folder


def test_two_that_write_one_folder_leave_the_first_and_nothing_else(tmp_path):
    target = tmp_path / "made" / "model"
    with pytest.raises(OSError, match="not empty"), new_folder(target) as late:
        with new_folder(target) as first:
            assert first != late and not target.exists()
            (first / "config.json").write_text("first")
        (late / "config.json").write_text("late")
    assert (target / "config.json").read_text() == "first"
    assert [path.name for path in target.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_is_interrupted_leaves_nothing(error, tmp_path):
    with pytest.raises(type(error)), new_folder(tmp_path / "model") as folder:
        (folder / "half").touch()
        raise error
    assert not list(tmp_path.iterdir())

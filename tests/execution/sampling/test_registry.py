"""Each parameter belongs to one edit or to another part, or nothing can be imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from runpy import run_path

import pytest

from jpaged import sampling_params
from jpaged.execution.sampling import registry
from jpaged.execution.sampling.registry import EDITS, check_edits
from jpaged.execution.sampling.truncations import MinP, TopP
from jpaged.sampling_params import SamplingParams, integers, parameter, parameters_of


@dataclass(kw_only=True)
class WithForgotten(SamplingParams):
    forgotten: int = parameter(0, integers(0), "edit")


@dataclass(kw_only=True)
class WithRangeless(SamplingParams):
    rangeless: int = 0


class Twice(MinP):
    """Another edit of the same field."""


class OfEnds(MinP):
    fields = ("max_tokens",)


class SameArrays(MinP):
    fields = ()


def test_a_parameter_that_no_edit_reads_is_refused_by_name():
    with pytest.raises(TypeError, match=r"WithForgotten\.forgotten is part of edit, and no class in EDITS"):
        check_edits(EDITS, WithForgotten)


def test_a_parameter_without_a_range_and_a_part_is_refused_by_name():
    with pytest.raises(TypeError, match=r"WithRangeless\.rangeless has no range and belongs nowhere"):
        parameters_of(WithRangeless)
    with pytest.raises(TypeError, match="rangeless"):
        WithRangeless()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (Twice(), r"min_p is in the fields of 2 classes"),
        (OfEnds(), r"max_tokens is part of ends, and a class in EDITS"),
        (SameArrays(), r"the arrays of 2 classes in EDITS are named LeastWeights"),
    ],
    ids=lambda case: type(case).__name__,
)
def test_an_edit_that_others_collide_with_is_refused(edit, message):
    with pytest.raises(TypeError, match=message):
        check_edits([*EDITS, edit])


@pytest.mark.parametrize("field", sorted(name for edit in EDITS for name in edit.fields))
def test_each_field_of_each_edit_is_missed_where_the_edit_is_left_out(field):
    with pytest.raises(TypeError, match="is part of edit, and no class"):
        check_edits([edit for edit in EDITS if field not in edit.fields])


def test_importing_fails_where_an_edit_leaves_a_field_out(monkeypatch):
    monkeypatch.setattr(TopP, "fields", ())
    with pytest.raises(TypeError, match=r"SamplingParams\.top_p is part of edit, and no class"):
        run_path(registry.__file__)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("new: int = 0", "SamplingParams.new has no range and belongs nowhere"),
        ('new: int = parameter(0, integers(0), "edit")', "SamplingParams.new is part of edit, and no class in EDITS"),
    ],
)
def test_importing_fails_where_a_field_is_only_added(line, message, tmp_path, monkeypatch):
    before, after = "    output_kind: RequestOutputKind = parameter(", Path(sampling_params.__file__).read_text()
    (tmp_path / "with_new.py").write_text(after.replace(before, f"    {line}\n{before}"))
    with pytest.raises(TypeError, match=message):
        changed = run_path(str(tmp_path / "with_new.py"), run_name="with_new")
        monkeypatch.setattr(sampling_params, "SamplingParams", changed["SamplingParams"])
        run_path(registry.__file__)

"""Sampling and beam parameters as plain data, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from jpaged.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from jpaged.structured_outputs import StructuredOutputsParams


def params_data(params: SamplingParams) -> dict[str, Any]:
    """Return every parameter by its name."""
    data = {field.name: getattr(params, field.name) for field in fields(params)}
    shape = params.structured_outputs
    if shape is not None:
        given = {field.name: getattr(shape, field.name) for field in fields(shape)}
        # A schema may hold what only JSON can, such as numbers of any length.
        data["structured_outputs"] = {**given, "json": None if shape.json is None else json.dumps(shape.json)}
    return {**data, "output_kind": params.output_kind.name}


def load_params(data: Mapping[str, Any]) -> SamplingParams:
    """Return parameters, which are checked as those that a user gives.

    Raises:
        ValueError, TypeError: they are not ones that can be given.
    """
    shape = data["structured_outputs"]
    return SamplingParams(
        **{
            **data,
            "structured_outputs": None if shape is None else StructuredOutputsParams(**shape),
            "output_kind": RequestOutputKind[data["output_kind"]],
        }
    )


def beam_params_data(params: BeamSearchParams) -> dict[str, Any]:
    """Return every parameter by its name."""
    return asdict(params)


def load_beam_params(data: Mapping[str, Any]) -> BeamSearchParams:
    """Return parameters, which are checked as those that a user gives."""
    return BeamSearchParams(**data)

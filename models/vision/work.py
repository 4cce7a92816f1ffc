"""Counts what a patch of a picture costs its tower, in tokens of the text model."""

from __future__ import annotations

import math
from typing import Any

import jax
from flax import nnx

from ..linear import ExpertLinear
from ..routing import Router
from ..stack import LayerStack


def patch_work(tower: nnx.Module, text: nnx.Module) -> float:
    """Return the products of a patch, which goes through all layers of the tower, over those of a token. Attention's
    scores, and what either computes outside its layers, are left out. A tower without layers counts as a token."""
    return products(tower) / products(text) or 1.0


def products(model: nnx.Module) -> float:
    """Return the numbers of the layers' matrices that one token or patch is multiplied by: of experts, its share."""
    layers = [module for _, module in nnx.iter_graph(model) if isinstance(module, LayerStack)]
    total = float(sum(map(_numbers, layers)))
    for stack in layers:
        within = [module for _, module in nnx.iter_graph(stack)]
        routers = [module for module in within if isinstance(module, Router)]
        experts = sum(_numbers(module) for module in within if isinstance(module, ExpertLinear))
        if routers and experts:
            total -= experts * (1 - routers[0].routing.per_token / routers[0].linear.weight.shape[-1])
    return total


def _numbers(module: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(module, nnx.Param)))

"""Runs recurrences over ragged batches: decodes and pieces of prompts together, state in and out by block.

Every kernel here is called as ``kernel(view, layer, place, units, *operands, impl=impl, **options) -> (view, out)``:

    view, layer   the group's blocks, ``[blocks, layers, rows, 128]``, and the index of a layer, which may be traced
    place         the state's place in a block; its shape is the kernel's, over the heads or channels of this device
    units         the step's tokens, cut into units of one sequence each (`pallas_kernels.recurrent.layout`)
    impl          see `pallas_kernels.platform.Impl`; None picks by platform. ``cpu`` takes float32 pools and states;
                  ``tpu`` and ``gpu`` run decodes of supported shapes; everything else runs as ``xla``
    view, out     the view with the states after the units, in place if it is donated; every token's output in the
                  dtype of the inputs, 0 for tokens of no unit

All arithmetic is float32. A ValueError names a shape that does not fit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.platform import Impl, resolve_impl
from pallas_kernels.recurrent import cpu, recurrence, reference, tpu, xla
from pallas_kernels.recurrent.layout import StatePlace, Units
from pallas_kernels.recurrent.recurrence import Activation

__all__ = ["causal_conv", "gated_delta", "selective_scan", "ssd"]

_log = logging.getLogger(__name__)


def causal_conv(
    view: Shaped[Array, "blocks layers rows 128"],
    layer: int | Int[Array, ""],
    place: StatePlace,
    units: Units,
    x: Float[Array, "tokens ch"],
    weight: Float[Array, "ch width"],
    bias: Float[Array, " ch"] | None,
    *,
    activation: Activation = None,
    impl: Impl | None = None,
) -> tuple[Shaped[Array, "blocks layers rows 128"], Float[Array, "tokens ch"]]:
    """Convolve each channel with its own weights over the last `width` inputs of the sequence, this token's included.

    The state ``[ch, width - 1]`` holds the inputs before the token.

    Raises:
        ValueError: a shape does not fit, the weights are of one input, or `activation` is unknown.
    """
    channels, width = weight.shape
    if width < 2:
        raise ValueError(f"weight: {weight.shape} is of width 1, which leaves nothing to be kept")
    if activation not in (None, "silu"):
        raise ValueError(f"activation={activation!r} is neither None nor 'silu'")
    _check("x", x, (len(x), channels))
    if bias is not None:
        _check("bias", bias, (channels,))
    _check_state(place, (channels, width - 1))
    what = recurrence.conv(place, x, weight, bias, activation)
    return _run(impl, view, layer, units, what, lambda on: on.conv(what.place, x, weight, bias, activation))


def selective_scan(
    view: Shaped[Array, "blocks layers rows 128"],
    layer: int | Int[Array, ""],
    place: StatePlace,
    units: Units,
    x: Float[Array, "tokens ch"],
    dt: Float[Array, "tokens ch"],
    a: Float[Array, "ch n"],
    b: Float[Array, "tokens n"],
    c: Float[Array, "tokens n"],
    d: Float[Array, " ch"],
    *,
    impl: Impl | None = None,
) -> tuple[Shaped[Array, "blocks layers rows 128"], Float[Array, "tokens ch"]]:
    """Scan as Mamba does (arXiv 2312.00752): ``h = exp(dt * a) * h + dt * b * x``, ``y = h . c + d * x``.

    The state ``[ch, n]`` is h.

    Args:
        dt: after softplus, at least 0.
        a: at most 0.

    Raises:
        ValueError: a shape does not fit.
    """
    (tokens, channels), n = x.shape, a.shape[1]
    _check("dt", dt, x.shape)
    _check("a", a, (channels, n))
    _check("b", b, (tokens, n))
    _check("c", c, (tokens, n))
    _check("d", d, (channels,))
    _check_state(place, (channels, n))
    what = recurrence.scan(place, x, dt, a, b, c, d)
    return _run(impl, view, layer, units, what, lambda on: on.scan(what.place, x, dt, a, b, c, d))


def ssd(
    view: Shaped[Array, "blocks layers rows 128"],
    layer: int | Int[Array, ""],
    place: StatePlace,
    units: Units,
    x: Float[Array, "tokens h p"],
    dt: Float[Array, "tokens h"],
    a: Float[Array, " h"],
    b: Float[Array, "tokens g n"],
    c: Float[Array, "tokens g n"],
    d: Float[Array, " h"],
    *,
    impl: Impl | None = None,
) -> tuple[Shaped[Array, "blocks layers rows 128"], Float[Array, "tokens h p"]]:
    """Scan as Mamba-2 does (arXiv 2405.21060): `selective_scan` with one decay a head; ``h // g`` neighbouring heads
    share b and c.

    The state ``[h, p, n]`` is h.

    Args:
        dt: after softplus, at least 0.
        a: at most 0.

    Raises:
        ValueError: a shape does not fit, or groups do not divide the heads.
    """
    (tokens, heads, width), (groups, n) = x.shape, b.shape[1:]
    if heads % groups:
        raise ValueError(f"b: {b.shape} has {groups} groups, which do not divide the {heads} heads of x")
    _check("dt", dt, (tokens, heads))
    _check("a", a, (heads,))
    _check("b", b, (tokens, groups, n))
    _check("c", c, (tokens, groups, n))
    _check("d", d, (heads,))
    _check_state(place, (heads, width, n))
    what = recurrence.ssd(place, x, dt, a, b, c, d)
    view, out = _run(impl, view, layer, units, what, lambda on: on.ssd(what.place, x, dt, a, b, c, d))
    return view, out.reshape(x.shape)


def gated_delta(
    view: Shaped[Array, "blocks layers rows 128"],
    layer: int | Int[Array, ""],
    place: StatePlace,
    units: Units,
    q: Float[Array, "tokens h k"],
    k: Float[Array, "tokens h k"],
    v: Float[Array, "tokens h v"],
    log_decay: Float[Array, "tokens h"],
    beta: Float[Array, "tokens h"],
    *,
    impl: Impl | None = None,
) -> tuple[Shaped[Array, "blocks layers rows 128"], Float[Array, "tokens h v"]]:
    """Apply the gated delta rule (arXiv 2412.06464): the state decays, its value for k moves towards v by `beta`, and q
    reads it.

    The state ``[h, k, v]`` is the matrix S of ``o = q S``.

    Args:
        q, k: already normalised and scaled by the model.
        log_decay: at most 0.

    Raises:
        ValueError: a shape does not fit.
    """
    tokens, heads, width = v.shape
    _check("q", q, (tokens, heads, q.shape[2]))
    _check("k", k, q.shape)
    _check("log_decay", log_decay, (tokens, heads))
    _check("beta", beta, (tokens, heads))
    _check_state(place, (heads, q.shape[2], width))
    what = recurrence.delta(place, q, k, v, log_decay, beta)
    return _run(impl, view, layer, units, what, lambda on: on.delta(what.place, q, k, v, log_decay, beta))


def _run(
    impl: Impl | None,
    view: Array,
    layer: int | Int[Array, ""],
    units: Units,
    what: recurrence.Recurrence,
    describe: Callable[[Any], Any],
) -> tuple[Array, Array]:
    """Run a recurrence by the chosen implementation, or by XLA if that does not take it.

    `describe` returns a module's description of the recurrence for its own `run`; None = the module does not take the
    shapes.
    """
    chosen = resolve_impl(impl)
    if chosen == "reference":
        return reference.run(view, layer, units, what)
    module, options = _module_of(chosen)
    if module is not None:
        kernel = describe(module) if module.takes(view, what.place) else None
        if kernel is not None:
            return module.run(view, layer, units, what, kernel, **options)
        if chosen != "cpu":
            _say_once(chosen, what.place.shape, what.place.dtype.name, view.dtype.name)
    return xla.run(view, layer, units, what)


@cache
def _say_once(impl: Impl, shape: tuple[int, ...], state: str, pool: str) -> None:
    said = "recurrent layers: XLA's version runs, kernels of impl=%r take no state of %s in %s, in a pool of %s"
    _log.warning(said, impl, shape, state, pool)


def _module_of(chosen: Impl) -> tuple[Any, dict[str, bool]]:
    if chosen == "cpu":
        return cpu, {}
    if chosen == "gpu":
        from pallas_kernels.recurrent import gpu  # imports triton, which only a GPU's environment has

        return gpu, {}
    return (tpu, {"interpret": chosen == "tpu_interpret"}) if chosen in ("tpu", "tpu_interpret") else (None, {})


def _check(name: str, array: Array, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"{name}: {array.shape} is not {shape}")


def _check_state(place: StatePlace, shape: tuple[int, ...]) -> None:
    if place.shape != shape:
        raise ValueError(f"place: a state of {place.shape} is not the {shape} of the operands")

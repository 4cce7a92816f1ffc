"""Counts how many kernels Triton compiles for all shapes of an engine's steps on an NVIDIA GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from scripts.cases import Rows
from scripts.compiled_code.compilers import need_compiler
from scripts.compiled_code.gpu_bytes import Dtype, Quantization, llama_programs

NOT_COMPILED = ("grid", "name", "out_shapes", "input_output_aliases", "debug", "serialized_metadata", "zeroed_outputs")


def compiles(
    device: str = "h200",
    dtype: Dtype = "bfloat16",
    quantization: Quantization | None = None,
    seqs: int = 256,
    tokens: int = 8192,
    context: int = 8192,
    layers: int = 2,
) -> Rows:
    """Launches of each Triton kernel in all shapes of a Llama-3.1-8B's steps, and how often Triton compiles it.

    Steps are traced, not compiled. jax-triton compiles a kernel once for all launches of equal constants, dtypes, warps
    and stages in a process; it keeps nothing on disk. `tokens` is the most of a step. The shapes are of `layers`
    layers."""
    need_compiler("cuda")
    from jpaged.execution.batch import empty_batch
    from jpaged.execution.caches.pool import abstract_pool
    from jpaged.execution.compile.buckets import Buckets
    from jpaged.execution.step import make_step
    from jpaged.planning.devices import find_device
    from jpaged.planning.target_mesh import target_capability, target_mesh

    target = find_device(device)
    mesh = target_mesh(target, compiled=True)
    found: Counter[tuple[str, str]] = Counter()
    with target_capability(target):
        made = llama_programs(mesh, dtype, quantization, layers, seqs, context, tokens)
        buckets = Buckets(max_num_seqs=seqs, max_num_batched_tokens=tokens)
        step = make_step(made.graphdef, made.spec, mesh, kernel_impl="gpu")
        shapes = [*buckets.decode, *buckets.mixed]
        for bucket in shapes:
            batch = empty_batch(bucket, made.spec, max_num_seqs=seqs, max_model_len=context)
            arrays = made.params, abstract_pool(made.spec, mesh), made._of_all(batch), made._last_tokens
            found.update(launches_of(step.trace(*arrays, decode_only=bucket.decode_only).jaxpr.jaxpr))
    launched: Counter[str] = Counter()
    for (name, _), number in found.items():
        launched[name] += number
    compiled = Counter(name for name, _ in found)
    return [
        {"kernel": name, "shapes of steps": len(shapes), "launches": launched[name], "compiled": compiled[name]}
        for name in sorted(launched)
    ]


def launches_of(jaxpr: Any) -> Iterator[tuple[str, str]]:
    """Yield each launch's kernel, and all that Triton compiles it for."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "triton_kernel_call":
            given = {name: value for name, value in equation.params.items() if name not in NOT_COMPILED}
            scalars = [(place, dtype, value == 1) for place, dtype, value in given.pop("scalar_args")]
            dtypes = [str(variable.aval.dtype) for variable in (*equation.invars, *equation.outvars)]
            kernel = given.pop("fn").__name__
            yield kernel, repr((scalars, dtypes, sorted(given.items(), key=lambda item: item[0])))
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from launches_of(inner)

"""Compares products of rows with their experts' matrices on NVIDIA GPUs: XLA's, and our Triton kernel."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

from scripts.cases import Row
from scripts.compiled_code.compilers import chosen, need_compiler
from scripts.compiled_code.hlo_bytes import moved_bytes
from scripts.compiled_code.tpu_experts import SHAPES, Experts


def gpu_experts(
    devices: list[str] = ["h200"],  # noqa: B006 (never changed)
    shapes: list[str] = ["qwen3-30b-a3b"],  # noqa: B006
    tokens: list[int] = [64, 512],  # noqa: B006
    kernels: list[Literal["triton", "ragged_dot"]] = ["triton", "ragged_dot"],  # noqa: B006
) -> Iterator[Row]:
    """Bytes that two products of a layer's experts move, gate and up and then down, in bfloat16.

    Compiles `pallas_kernels.matmul.gpu_grouped` ("triton") and `jax.lax.ragged_dot`. A row has the bytes of the
    matrices; those that the program moves by `hlo_bytes`, of which a Triton kernel's are its operands and results once;
    how many times the matrices' they are; operations; temporaries; and what a thread of the Triton kernel takes.
    Nothing has run on a GPU."""
    need_compiler("cuda")
    from jpaged.planning.devices import find_device
    from jpaged.planning.target_mesh import target_capability, target_mesh

    for name in devices:
        device = find_device(name)
        major, minor = device.chip.cuda.capability
        with target_capability(device):
            mesh = target_mesh(device, compiled=True)
            for shape, sizes in chosen("shapes", shapes, SHAPES).items():
                for number in tokens:
                    for kernel in kernels:
                        row: Row = {"device": name, "shape": shape, "tokens": number, "kernel": kernel}
                        yield row | _measure(mesh, 10 * major + minor, sizes, number, kernel)


def _measure(mesh: Any, capability: int, sizes: Experts, tokens: int, kernel: str) -> Row:
    """Return the rest of a row."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from pallas_kernels.matmul import matmul_grouped

    start, here, rows = time.perf_counter(), NamedSharding(mesh, P()), sizes.rows(tokens)

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=here)

    def run(product, x, gate_up, down, counts):
        gate, up = jnp.split(product(x, gate_up, counts), 2, axis=-1)
        return product(jax.nn.silu(gate) * up, down, counts)

    tables = array(sizes.own, sizes.embed, 2 * sizes.mlp), array(sizes.own, sizes.mlp, sizes.embed)
    given = array(rows, sizes.embed), *tables, array(sizes.own, dtype=jnp.int32)
    product = partial(matmul_grouped, impl="gpu" if kernel == "triton" else "xla")
    compiled = jax.jit(partial(run, product)).lower(*given).compile()
    moved = moved_bytes(compiled.as_text())
    row: Row = {
        "matrices, MB": sizes.table_bytes / 1e6,
        "moved, MB": moved.total / 1e6,
        "times": moved.total / sizes.table_bytes,
        "operations": moved.operations,
        "temporaries, MB": compiled.memory_analysis().temp_size_in_bytes / 1e6,
    }
    row |= _resources(capability, given) if kernel == "triton" else {"registers": "", "spilled": "", "shared": ""}
    return row | {"by kind": moved.by_kind, "compile s": round(time.perf_counter() - start)}


def _resources(capability: int, given: Any) -> Row:
    """Return what a thread of the Triton kernel takes: registers and bytes spilled, and a program's shared memory."""
    import jax
    from triton import knobs

    from pallas_kernels.matmul.gpu_grouped import matmul_grouped
    from scripts.compiled_code.triton_compiler import Compiler

    compiler = Compiler(capability)
    x, gate_up, _, counts = given
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope():
        knobs.cache.dir = folder  # jax-triton has taken Triton's away
        jax.eval_shape(partial(matmul_grouped, launch=compiler), x, gate_up, counts)
    (takes,) = compiler.kernels.values()
    return {name: takes[name] for name in ("registers", "spilled", "shared")}

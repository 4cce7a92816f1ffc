"""Compile products with quantised matrices for one TPU v5e and for eight that split the inputs, and print what each
takes, as JSON.

Run by `test_aot_products.py` inside the environment with libtpu; one product a line. The matrix is that of
Llama-3-8B's MLP, 4096 x 14336.
"""

from __future__ import annotations

import json
import re
from functools import partial

from hlo_collectives import collectives
from targets import AXIS, tpu_mesh

INPUTS, OUTPUTS, GROUP = 4096, 14336, 128


def main() -> None:
    mesh = tpu_mesh("v5e:2x4")  # before jax is imported

    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from pallas_kernels.quantised import UINT4, UINT4_PAIRS, QuantisedMatrix
    from pallas_kernels.quantised_matmul import quantised_matmul

    def compile_product(name: str, mesh: Mesh, rows: int, make) -> None:
        def array(shape, dtype, spec=None):
            split = P(AXIS, None) if spec is None else spec
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, split))

        x = array((rows, INPUTS), jnp.bfloat16, P(None, AXIS))
        multiply = partial(quantised_matmul, input_shards=mesh.size, impl="tpu")
        whole = NamedSharding(mesh, P())
        compiled = jax.jit(lambda x, m: multiply(x, [m]), out_shardings=whole).lower(x, make(array)).compile()
        text = compiled.as_text()
        print(
            json.dumps({"name": name, "rows": rows, "devices": mesh.size} | sizes(compiled, text, mesh.size)),
            flush=True,
        )

    def sizes(compiled, text: str, devices: int) -> dict[str, object]:
        return {
            "cycles": cycles(text, INPUTS // GROUP // devices),
            "temp": compiled.memory_analysis().temp_size_in_bytes,
            "collectives": [c.kind for c in collectives(text)],
        }

    def uint4(array):
        scales = array((INPUTS // GROUP, OUTPUTS), jnp.float32)
        return QuantisedMatrix(array((INPUTS, OUTPUTS), jnp.uint4), scales, scales, codec=UINT4)

    def packed(array):
        scales = array((INPUTS // GROUP, OUTPUTS), jnp.float32)
        return QuantisedMatrix(array((INPUTS // 2, OUTPUTS), jnp.uint8), scales, scales, codec=UINT4_PAIRS)

    def int8(array):
        scales = array((1, OUTPUTS), jnp.float32, P())
        return QuantisedMatrix(array((INPUTS, OUTPUTS), jnp.int8), scales)

    one = Mesh(mesh.devices[:1], (AXIS,))
    for name, make in (("uint4", uint4), ("packed", packed), ("int8", int8)):
        for rows in (64, 512):
            for devices in (one, mesh):
                compile_product(name, devices, rows, make)


def cycles(text: str, turns: int) -> int:
    """Return the estimated cycles of a program, which may have one loop of so many turns."""
    total = 0
    for part in re.split(r"\n(?=(?:ENTRY )?%)", text):
        name = part.removeprefix("ENTRY ").split()[0]
        if "fused_computation" not in name:
            own = sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', part)))
            total += own * (turns if re.search(rf"body={re.escape(name)}\b", text) else 1)
    return total


if __name__ == "__main__":
    main()

"""A launcher that compiles Triton kernels for a GPU that is not there, and says what they take of one."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pallas_kernels.gpu_launch import Launch
from scripts.compiled_code.sass import resources

POINTERS = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16", "int32": "*i32", "int8": "*i8", "uint8": "*u8"}


@dataclass
class Compiler:
    """`pallas_kernels.gpu_launch.Launcher` to be traced by `jax.eval_shape`; records what each launch needs.

    Attributes:
        capability: e.g. 90 for sm_90.
        kernels: kernel name to its shared memory in bytes, registers a thread, and spilled bytes a thread.
        made: kernel name to its last launch and cubin.
    """

    capability: int
    kernels: dict[str, dict[str, int]] = field(default_factory=dict)
    made: dict[str, tuple[Launch, bytes]] = field(default_factory=dict)

    def __call__(self, launch: Launch, *inputs: jax.Array | int) -> list[jax.ShapeDtypeStruct]:
        arrays = [*inputs, *launch.out]
        names = [name for name in launch.kernel.arg_names if name not in launch.constants]
        assert len(names) == len(arrays), (names, len(arrays))
        given = zip(names, arrays, strict=True)
        signature = {name: "i32" if isinstance(x, int) else POINTERS[x.dtype.name] for name, x in given}
        source = ASTSource(
            launch.kernel,
            signature=signature | dict.fromkeys(launch.constants, "constexpr"),
            constexprs=dict(launch.constants),
            attrs={(i,): [["tt.divisibility", 16]] for i, x in enumerate(arrays) if not isinstance(x, int)},
        )
        compiled = triton.compile(
            source,
            target=GPUTarget("cuda", self.capability, 32),
            options={"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": True},
        )
        name = launch.kernel.__name__
        takes = {"shared": compiled.metadata.shared} | resources(compiled.asm["cubin"])
        self.made[name] = launch, compiled.asm["cubin"]
        known = self.kernels.get(name, takes)  # a kernel of several forms is what the largest takes
        self.kernels[name] = {what: max(number, known[what]) for what, number in takes.items()}
        return [jax.numpy.zeros(out.shape, out.dtype) for out in launch.out]

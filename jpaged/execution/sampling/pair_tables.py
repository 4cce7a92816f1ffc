"""Writes lists of pairs that are too long for the sampler into tables on the devices, a piece at a time.

Penalties have a pair of a row and a token for each distinct token of a sequence. Were the lists' length part of the
sampler's shape, a batch whose outputs grow would compile one sampler after the other while requests wait. A table has a
value for each token of each row, as the logits have, so one more sampler serves lists of any length.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import cached_property
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from jpaged.execution.compile.program import Program
from jpaged.execution.compile.store import ProgramStore
from jpaged.execution.mesh import HostOrDevice, each_replica, own_shapes, own_sharding
from jpaged.execution.sampling.edit import Edit, Table
from jpaged.execution.sampling.registry import EDITS
from jpaged.execution.sampling.sampler import SamplingArrays

Tables = tuple[Table | None, ...]
"""The table of each of `EDITS`; None for those without pairs."""


class PairTables:
    """Writes the pairs of a draw into tables.

    Args:
        on_compile, on_compiled: see `Program`.
        store: where the programs are loaded from, or collected for, see `Program`.
    """

    def __init__(
        self,
        mesh: Mesh,
        vocab_size: int,
        on_compile: Callable[[Hashable], None] = lambda shape: None,
        on_compiled: Callable[[Hashable, float], None] = lambda shape, seconds: None,
        *,
        store: ProgramStore | None = None,
    ) -> None:
        self._mesh = mesh
        self._vocab_size = vocab_size
        made_of = "tables", mesh, vocab_size
        callbacks = on_compile, on_compiled
        self._write = Program(self._function, *callbacks, made_of, kind="tables", store=store)

    @cached_property
    def _function(self) -> jax.stages.Wrapped:
        """Return the function ``write(tables, piece, last_tokens) -> tables``. Tables are donated; None makes them."""
        vocab_size = self._vocab_size

        def write(tables: Tables | None, piece: SamplingArrays, last_tokens: Int[Array, " max_seqs"]) -> Tables:
            seqs = piece.position.shape[0]
            begun = [None] * len(EDITS) if tables is None else tables

            def of(edit: Edit[Any], arrays: Any, table: Table | None) -> Table | None:
                if not edit.pairs:
                    return None
                return edit.spread(edit.table(seqs, vocab_size) if table is None else table, arrays, last_tokens)

            return tuple(map(of, EDITS, piece.edits, begun))

        on_all = each_replica(write, self._mesh, ("own", "own", "own"), "own")
        return jax.jit(on_all, donate_argnums=0, out_shardings=own_sharding(self._mesh))

    def of(
        self, pieces: Iterable[SamplingArrays], last_tokens: Int[HostOrDevice, "*replicas max_seqs"]
    ) -> SamplingArrays:
        """Return the arguments of a draw with tables for the lists of all its pieces, of which there is one at least.

        Args:
            last_tokens: what the step before drew.
        """
        tables: Tables | None = None
        for piece in pieces:
            tables = self._write(self._key(piece, tables is not None), tables, piece, last_tokens)
        assert tables is not None
        return with_tables(piece, tables)

    def _key(self, piece: SamplingArrays, begun: bool) -> Hashable:
        return "tables", piece.position.shape[-1], begun

    def prepare(
        self, piece: SamplingArrays, last_tokens: Int[HostOrDevice, "*replicas max_seqs"], *, begun: bool
    ) -> Callable[[], None]:
        """Trace what writes a piece into tables, and makes them unless they are `begun`; return a call that compiles
        it."""
        tables = self.tables(piece, last_tokens) if begun else None
        return self._write.prepare(self._key(piece, begun), tables, piece, last_tokens)

    def shapes(self, args: SamplingArrays, last_tokens: Int[HostOrDevice, "*replicas max_seqs"]) -> SamplingArrays:
        """Return the arguments of a draw with the shapes of tables for its lists."""
        return with_tables(args, self.tables(args, last_tokens))

    def tables(self, args: SamplingArrays, last_tokens: Any) -> Tables:
        """Return the shapes of a draw's tables, as they lie on the devices; both arguments may be shapes."""
        made: Tables = jax.eval_shape(self._function, None, args, last_tokens)
        return own_shapes(made, self._mesh)

    def forget(self) -> None:
        """Release all compiled programs."""
        self._write.forget()


def with_tables(args: SamplingArrays, tables: Tables) -> SamplingArrays:
    """Return the arguments of a draw with tables for lists of pairs."""
    each = zip(EDITS, args.edits, tables, strict=True)
    return args._replace(
        edits=tuple(arrays if table is None else edit.with_table(arrays, table) for edit, arrays, table in each)
    )

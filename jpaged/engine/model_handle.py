"""What `jpaged.LLM` holds of a model: its engine, weights, tokenizer and defaults, cached prefixes and memory."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from jpaged.engine.handle import EngineHandle
from jpaged.engine.new_weights import HeldWeights, Running, replacement, widen_weights
from jpaged.engine.progress import warmup_progress
from jpaged.engine.replica import chosen_replica
from jpaged.memory import MemoryMap, MemoryReport
from jpaged.outputs import PinnedPrefix
from jpaged.sampling_params import SamplingParams
from jpaged.text.input_processor import PREFILL_ONLY
from jpaged.text.prompt import Prompt
from jpaged.validation import boolean

if TYPE_CHECKING:
    from jpaged.engine.builder import Built
    from jpaged.training import TrainableModel

logger = logging.getLogger(__name__)


class ModelHandle(EngineHandle):
    """Holds an engine and what was learnt of its model; it does everything that `jpaged.LLM` does beside generating.

    Attributes:
        config: the engine's settings, with the sizes that its device chose.
        model_config: what the checkpoint says of the model.
        tokenizer: a transformers tokenizer; None where the model has none.
        held_weights: how the engine holds its weights.
    """

    def __init__(self, built: Built) -> None:
        self.config = built.config
        self.model_config = built.model_config
        self.tokenizer = built.tokenizer
        self.input_processor = built.input_processor
        self.output_processor = built.output_processor
        self._dtype = built.dtype
        self._model = built.model
        self._sampling = built.sampling
        self._pooling = built.pooling
        self._trainable: TrainableModel | None = None
        runner = built.engine.runner
        self._devices = runner.spec, runner.mesh
        self._max_model_len = built.engine.max_model_len
        self.held_weights = HeldWeights(runner.worker.model, built.model, built.dtype, built.config.quantization)
        super().__init__(built.engine)

    def get_tokenizer(self) -> Any:
        """Return the tokenizer, which is transformers'.

        Raises:
            ValueError: the model has none.
        """
        if self.tokenizer is None:
            raise ValueError(f"{self.config.model} has no tokenizer; tokenizer= takes another model's")
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what requests without SamplingParams get: what generation_config.json advises, and else vLLM's
        defaults."""
        return SamplingParams(**self._sampling)

    # ------------------------------------------------------------------ the engine's state

    def warmup(self, *, use_tqdm: bool = True) -> int:
        """Compile every shape the engine can meet and return how many there are. Later compilations count as
        recompiles.

        With ``enforce_eager=True`` nothing is compiled ahead.
        """
        with self._engine.turn:
            if self._engine.has_work:
                raise RuntimeError("warmup() is refused while requests run")
            self._engine.check_awake("warmup()")
            runner, start = self._engine.runner, time.monotonic()
            if self.config.enforce_eager:
                return runner.worker.num_compiled
            self._engine.stop_compiling()
            with warmup_progress(runner.num_warmup, use_tqdm) as advance:
                for name in runner.warmup():
                    advance(name)
            logger.info("compiled %d shapes in %.1f s", runner.worker.num_compiled, time.monotonic() - start)
            return runner.worker.num_compiled

    @property
    def max_model_len(self) -> int:
        """Return the most tokens of a sequence, prompt and output."""
        return self._engine.max_model_len

    @property
    def vocab_size(self) -> int:
        """Return the number of token ids; every id is below it."""
        return self.input_processor.vocab_size

    @property
    def dtype(self) -> Any:
        """Return the dtype of activations and of weights that are not quantised."""
        return self._dtype

    @property
    def num_recompiles(self) -> int:
        """Return how many shapes were compiled after `warmup`."""
        return self._engine.runner.worker.num_recompiles

    @property
    def params(self) -> Any:
        """Return the weights: a pytree of sharded arrays.

        A CPU that computes in float32 holds the matrices of a checkpoint in bfloat16 as they are, and others in panels
        of columns. Asking for the weights makes float32 arrays of them, which the engine then holds too, and its
        programs are compiled again.

        Raises:
            RuntimeError: `release_memory` let go of them or moved them to the host; or a signal's handler asks in the
                middle of a step for weights that are not held as arrays.
        """
        with self._engine.turn:
            if not self._engine.runner.worker.model.has_params:
                raise RuntimeError("params are not on the devices: release_memory() took them away")
            widen_weights(self._engine, "params")
            return self._engine.runner.worker.model.params

    def trainable(self) -> TrainableModel:
        """Return the model as `jpaged.training` differentiates it, in the tree of `params`."""
        from jpaged.training.engine_model import model_of_engine  # imports jax, which takes a second

        if self._trainable is None:
            self._trainable = model_of_engine(
                *self._devices,
                self._model,
                self.model_config,
                self._dtype,
                max_num_seqs=self.config.max_num_seqs,
                max_model_len=self._max_model_len,
                expert_parallel=self.config.enable_expert_parallel,
                deterministic=self.config.deterministic,
            )
        return self._trainable

    def update_params(
        self, new: Any, *, cast: bool = False, copy: bool = False, running: Running = "recompute"
    ) -> None:
        """Replace the weights in place, as an RL loop does after each optimiser step.

        Cached KV belongs to the old weights, so the prefix cache is empty afterwards, and pinned prefixes are computed
        again with the next request. The log-probabilities of tokens that were generated stay those of the weights that
        drew them.

        A CPU that computes in float32, and holds matrices as `params` says, holds arrays from the first update on, and
        its programs are compiled again, unless a state dict brings them, in bfloat16 where they are held so. With
        ``deterministic=True`` only those in bfloat16 become others.

        Args:
            new: a pytree with the structure, shapes and dtypes of `params`, which is placed on the engine's devices as
                they are, from device to device where the arrays lie on others. NNX's forms of it are taken too: a
                module, an `nnx.State`, what `nnx.split` gives, plain dictionaries. Or a state dict: all tensors of the
                model by the names of its Hugging Face checkpoint, in arrays of NumPy, JAX, PyTorch or any library that
                NumPy understands. The devices hold the old weights too until it is read.
            cast: whether other floating dtypes are changed to the engine's, and a state dict is quantised as the
                engine's weights are.
            copy: whether the engine gets arrays of its own. Else it holds those that lie where its own do: a trainer
                that donates its weights to the next step would take the engine's away.
            running: what becomes of requests that have begun and not ended. "recompute": the KV of their tokens so far
                is computed again with the new weights, and so is what they asked of their prompts; beam searches begin
                again. "finish": they keep their KV, which nobody else finds, and read it with the new weights; one that
                is preempted by recomputation computes it anew. "abort": they end with finish_reason "abort". Those
                that wait for admission are computed with the new weights, but "abort" ends them too.

        Raises:
            ValueError: `new` is none of these; a leaf or tensor differs, the first of which is named; or
                running="finish" while a request holds images. The old weights stay.
            RuntimeError: the weights lie on several hosts, of which only this one has the new; or a signal's handler
                calls it in the middle of a step.
        """
        with self._engine.turn:
            engine = self._engine
            replacement(self.held_weights, engine, new, cast=cast, copy=copy, running=running)()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV, and give back the memory of a CPU's pool; return False, with nothing done, while
        requests run or prefixes are pinned."""
        with self._engine.turn:
            if self._engine.has_work:
                return False
            forgotten = all(replica.memory.reset_prefix_cache() for replica in self._engine.replicas)
            self._engine.give_back_memory(at_once=True)
            return forgotten

    def pin_prefix(self, prompt: Prompt, cache_salt: str | None = None) -> PinnedPrefix:
        """Keep the KV of a prompt's whole blocks in the pool until `unpin`, computing it if need be, for prompts that
        begin with it and go on (the shared prefix a provider registers; PagedAttention, section 4.4). Of several
        replicas, each keeps it.

        Args:
            cache_salt: salt that prompts must have to share the prefix; it may stand in the prompt's mapping instead.

        Raises:
            ValueError: the prompt fills no block, prefix caching is off, or the rest of the pool would be too small
                for a sequence of max_model_len tokens.
            RuntimeError: requests are running.
        """
        inputs = self.input_processor
        prefix = inputs.prefix(prompt, cache_salt)
        with self._engine.turn:
            seq_id = inputs.new_seq_id()
            requests = [inputs.request(prefix, PREFILL_ONLY) for _ in self._engine.replicas]
            return PinnedPrefix(seq_id, self._engine.pin_prefix(seq_id, requests))

    def unpin(self, pinned: PinnedPrefix) -> None:
        """Let a pinned prefix be evicted again; ValueError when it is not pinned any more."""
        if not isinstance(pinned, PinnedPrefix):
            raise TypeError(f"unpin() takes what pin_prefix() returned, not {pinned!r}")
        with self._engine.turn:
            self._engine.unpin(pinned.seq_id)

    def memory_report(self, *, peak: bool = False, replica: int = 0) -> MemoryReport:
        """Return who holds the pool's blocks; `str()` of it is a table.

        Args:
            peak: whether to show the busiest step so far (to within 5 % of its blocks) instead of now.
            replica: number of the replica whose pool is shown, below data_parallel_size.

        Raises:
            ValueError: there is no such replica, or `peak` is not True or False.
        """
        boolean("peak", peak)
        with self._engine.turn:
            one = chosen_replica(self._engine.replicas, replica)
            return (one.peak_report if peak else None) or one.memory_report()

    def memory_map(self, *, replica: int = 0) -> MemoryMap:
        """Return what lies in every large page and block of the pool now: which group, which state, whose, how many
        tokens. A notebook draws it; `MemoryMap.changes` compares two.

        The first map walks the pool; later ones cost what changed in between.

        Args:
            replica: number of the replica whose pool is shown, below data_parallel_size.

        Raises:
            ValueError: there is no such replica.
        """
        with self._engine.turn:
            return chosen_replica(self._engine.replicas, replica).memory_map()

    def reset_peak(self) -> None:
        """Forget the busiest step: `memory_report(peak=True)` looks at those from now on."""
        with self._engine.turn:
            self._engine.reset_peak()

"""Turns the setting `speculative` into the scheduler's source of drafts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flax import nnx

from jpaged.config import EngineConfig
from jpaged.engine.memory_plan import resolve_max_model_len
from jpaged.execution.device_memory import device_bytes
from jpaged.execution.drafts import DraftProgram
from jpaged.loading import LoadedModel, load_draft_head, load_model
from jpaged.model_api import Bfloat16Tiles, Cuttable, DraftHead, LayerGroup, PacksImages, TakesImages
from jpaged.scheduling.speculation import DeviceSpeculation, NGramSpeculation, Speculation, StepCosts
from jpaged.speculative import MTP, Assistant, DFlash, DraftModel, Eagle3, Head, Layers, NGram, Speculative

_COSTS = {"cpu": StepCosts(token=0.02, verifying=0.15, tile=0.2)}
"""Costs of drafts, relative to a step of one token. Measured with SmolLM2-135M in float32 on a core of an AMD EPYC with
AVX-512: a step that verifies 1 draft costs 1.14, 3 drafts 1.2, 5 or 7 drafts 1.4, 10 drafts 1.66, 15 drafts 1.69."""
_OTHER_COSTS = StepCosts(token=0.01, verifying=0.15)

DRAFT_PREFIX = "draft."
"""Prefix of the names of a draft model's layer groups in the pool."""


def step_costs(device: str, draft_share: float = 0.0, *, at_once: bool = False) -> StepCosts:
    """Return what steps and drafts cost on a platform, ``cpu``, ``gpu`` or ``tpu``.

    Args:
        draft_share: cost of one pass that drafts on the device, as a share of a step of one token; 0 = the host drafts.
        at_once: whether one pass makes all drafts of a step; otherwise it makes one draft of each sequence.
    """
    costs = _COSTS.get(device, _OTHER_COSTS)
    return replace(costs, block=draft_share) if at_once else replace(costs, draft=draft_share)


@dataclass(frozen=True)
class DraftSource:
    """A program that makes drafts on the device, if any, with its layer groups and its cost.

    Attributes:
        program: the program that makes drafts; None = the device makes no drafts.
        groups: its own layer groups, under their names in the pool.
        share: cost of one of its passes, as a share of a step of one token of the engine's model.
    """

    program: DraftProgram | None = None
    groups: tuple[LayerGroup, ...] = ()
    share: float = 0.0


def make_speculation(speculative: Speculative, device: str, source: DraftSource) -> Speculation:
    """Return the `Speculation` that makes a scheduler's drafts on a platform.

    Args:
        source: see `draft_source`.
    """
    makes_blocks = source.program is not None and source.program.block is not None
    costs = step_costs(device, source.share, at_once=makes_blocks)
    if isinstance(speculative, NGram):
        return NGramSpeculation(speculative, costs)
    return DeviceSpeculation(speculative.tokens, costs)


def draft_source(config: EngineConfig, loaded: LoadedModel) -> DraftSource:
    """Return the source of drafts for a loaded model; a draft model or head is loaded here.

    Raises:
        ValueError: the model cannot be cut after those layers, the draft model does not fit it, or it has no head.
    """
    if isinstance(config.speculative, Layers):
        return _first_layers(config.speculative, loaded)
    if isinstance(config.speculative, DraftModel):
        return _draft_model(config.speculative, config, loaded)
    if isinstance(config.speculative, Head):
        return _head(config.speculative, config, loaded)
    return DraftSource()


def _first_layers(speculative: Layers, loaded: LoadedModel) -> DraftSource:
    model = nnx.merge(loaded.graphdef, loaded.params)
    if not isinstance(model, Cuttable):
        raise ValueError(f"speculative={speculative}: {type(model).__name__} has no first layers that could draft")
    try:
        model.cut(speculative.layers)
    except ValueError as error:
        raise ValueError(f"speculative={speculative}: {error}") from error
    num_layers = sum(len(group.layers) for group in loaded.model.layer_groups)
    return DraftSource(DraftProgram(nnx.split(model)[0]), (), speculative.layers / num_layers)


def _draft_model(speculative: DraftModel, config: EngineConfig, loaded: LoadedModel) -> DraftSource:
    draft = load_model(
        speculative.model,
        dtype=loaded.dtype.name,
        mesh=loaded.mesh,
        tensor_parallel_size=config.tensor_parallel_size,
        download_dir=config.download_dir,
        compact_tiles=Bfloat16Tiles.FLOAT32_PRODUCT,
        language_model_only=True,  # it reads text tokens only, and the placeholders of images as such
        longest=lambda _: resolve_max_model_len(config.max_model_len, loaded.config),
    )
    if draft.model.vocab_size != loaded.model.vocab_size:
        raise ValueError(
            f"speculative={speculative} has a vocabulary of {draft.model.vocab_size} tokens, and the model one of "
            f"{loaded.model.vocab_size}: a draft model needs the same"
        )
    groups = tuple(replace(group, name=DRAFT_PREFIX + group.name) for group in draft.model.layer_groups)
    share = device_bytes(draft.params) / device_bytes(loaded.params)
    return DraftSource(DraftProgram(draft.graphdef, draft.params, DRAFT_PREFIX), groups, share)


def _head(speculative: Head, config: EngineConfig, loaded: LoadedModel) -> DraftSource:
    if isinstance(loaded.model, TakesImages) and not isinstance(loaded.model, PacksImages):
        raise ValueError(
            f"speculative={speculative}: heads read no pictures of a tower of single images; "
            "language_model_only=True loads the model without it"
        )
    folder = None if isinstance(speculative, MTP) else speculative.model
    of_model = folder is None  # the head lies in the model's own checkpoint, and is read as the model is
    try:
        found = load_draft_head(
            loaded,
            folder,
            revision=config.revision if of_model else None,
            download_dir=config.download_dir,
            language_model_only=config.language_model_only and of_model,
            quantization=config.quantization if of_model else None,
            compact_tiles=Bfloat16Tiles.FLOAT32_PRODUCT,
            check=lambda head: _check_kind(speculative, head, loaded.config.get_text_config().num_hidden_layers),
        )
    except ValueError as error:
        raise ValueError(f"speculative={speculative}: {error}") from error
    groups = tuple(replace(group, name=DRAFT_PREFIX + group.name) for group in found.head.layer_groups)
    # A draft takes a product with the vocabulary's table too.
    table = loaded.params.get("lm_head", loaded.params["embed_tokens"]) if "lm_head" in found.tables else {}
    share = (device_bytes(found.params) + device_bytes(table)) / device_bytes(loaded.params)
    program = DraftProgram(found.graphdef, found.params, DRAFT_PREFIX, found.tables, found.taps, found.head.block)
    return DraftSource(program, groups, share)


_KINDS: dict[type[Speculative], str] = {
    MTP: "a head for multi-token prediction, which MTP reads from the checkpoint of the engine's own model",
    Eagle3: "an EAGLE-3 head, which Eagle3 reads",
    Assistant: "a Gemma 4 assistant, which Assistant reads",
    DFlash: "a DFlash drafter, which DFlash reads",
}
"""Each setting for heads -> the words for a folder that it reads."""


def _check_kind(speculative: Head, head: DraftHead, num_layers: int) -> None:
    """Raise ValueError unless a head is of the kind that the setting names, and makes as many drafts.

    Args:
        num_layers: layers of the engine's model.
    """
    kind: type[Speculative] = MTP
    if head.reads:
        kind = Assistant
    elif head.block is not None:
        kind = DFlash
    elif head.taps(num_layers):
        kind = Eagle3
    if not isinstance(speculative, kind):
        raise ValueError(f"the folder holds {_KINDS[kind]}")
    if head.block is not None and speculative.tokens >= head.block.size:
        raise ValueError(f"tokens={speculative.tokens} must be below the drafter's block_size={head.block.size}")

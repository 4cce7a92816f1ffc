"""The contract between the engine and a model family.

A family is a Flax NNX module found through the entry-point group ``jpaged.models`` under its Hugging Face
``model_type``. It tells the engine three things: which layers keep memory of which shape and life
(`LayerGroup`), where each parameter comes from (`WeightSource`), and how tokens become hidden states with
attention left to the engine's `Attend` callback, which owns the paged pool. The engine tells it one, when it builds
it: a `BuildContext`.

A family's config is the checkpoint's config.json. A family that states its defaults reads it itself (`ReadsConfigs`)
and starts without transformers, whose import takes seconds; the config of any other is transformers' ``AutoConfig``.

Dimension letters used everywhere:

    tokens     rows of the ragged batch (T)        seqs      sequences of the batch (S)
    kv_heads   KV heads (after head layout)        q_per_kv  query heads that share one KV head
    head_dim   width of a head                     embed     width of the residual stream
    vocab      padded vocabulary                   blocks    physical blocks of a layer group
    layers     layers of a group (or a stack)      tiles     128-lane tiles of one token's K and V
"""

from jpaged.model_api.contract import (
    Attend,
    AttendToImages,
    AttendToLatents,
    AttendWithinPrompts,
    BuildContext,
    CausalLM,
    Cuttable,
    DraftBlock,
    DraftHead,
    HasDraftHead,
    HasHeadBias,
    HasHeadTable,
    MayEncodePrompts,
    PlaceImageFeatures,
    PlaceOnAxes,
    PromptEncoder,
    Recur,
    ScalesEmbedding,
    SkipsUnreadRows,
    TakePreviousToken,
    TakesImages,
    Tappable,
)
from jpaged.model_api.heads import TENSOR_AXIS, HeadLayout, head_layout, padded
from jpaged.model_api.layer_groups import (
    AdapterGroup,
    AdapterSite,
    AttentionGroup,
    CrossAttentionGroup,
    ImageGroup,
    LatentGroup,
    LayerGroup,
    LayerRef,
    PreviousTokenGroup,
    StateGroup,
    StatePart,
)
from jpaged.model_api.model_config import ModelConfig, ReadsConfigs
from jpaged.model_api.packed_images import (
    AttendWithinSegments,
    EncodesInParts,
    PacksImages,
    RowArray,
    RowLayout,
    SeesAround,
    SegmentKind,
)
from jpaged.model_api.weight_source import Bfloat16Tiles, HostArray, WeightSource

LeavesOutUnread, SeesImages, TakeImages = SkipsUnreadRows, TakesImages, PlaceImageFeatures
"""Names of version 0.2; they go in the release after the next."""

__all__ = [
    "TENSOR_AXIS",
    "AdapterGroup",
    "AdapterSite",
    "Attend",
    "AttendToImages",
    "AttendToLatents",
    "AttendWithinPrompts",
    "AttendWithinSegments",
    "AttentionGroup",
    "Bfloat16Tiles",
    "BuildContext",
    "CausalLM",
    "CrossAttentionGroup",
    "Cuttable",
    "DraftBlock",
    "DraftHead",
    "EncodesInParts",
    "HasDraftHead",
    "HasHeadBias",
    "HasHeadTable",
    "HeadLayout",
    "HostArray",
    "ImageGroup",
    "LatentGroup",
    "LayerGroup",
    "LayerRef",
    "MayEncodePrompts",
    "ModelConfig",
    "PacksImages",
    "PlaceImageFeatures",
    "PlaceOnAxes",
    "PreviousTokenGroup",
    "PromptEncoder",
    "ReadsConfigs",
    "Recur",
    "RowArray",
    "RowLayout",
    "ScalesEmbedding",
    "SeesAround",
    "SegmentKind",
    "SkipsUnreadRows",
    "StateGroup",
    "StatePart",
    "TakePreviousToken",
    "TakesImages",
    "Tappable",
    "WeightSource",
    "head_layout",
    "padded",
]

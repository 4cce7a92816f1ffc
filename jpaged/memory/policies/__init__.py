"""The blocks that a layer group needs: one small class for each kind of layer (Jenga, section 5).

`base` has the rules, `attention` the layers that read the tokens before them, `recurrent` states, their checkpoints and
those of drafts, `features` blocks that hold no token of a sequence (images, adapters, the encoder's K and V),
`prompt_budget` layers that keep a fixed number of tokens. Layers that read another layer's KV (cross-layer sharing) own
no block and need no policy: they are not counted in `GroupSpec.num_layers`. A draft model's layers are one more group
of `FullAttention`.
"""

from jpaged.memory.policies.attention import ChunkedLocalAttention, FullAttention, LocalAttention, SlidingWindow
from jpaged.memory.policies.base import UNBOUNDED, Policy
from jpaged.memory.policies.features import Adapters, CrossAttention, ImageFeatures, NoTable
from jpaged.memory.policies.prompt_budget import PromptBudget, TokenBudget
from jpaged.memory.policies.recurrent import StateCheckpoints, VerifiedStates

__all__ = [
    "UNBOUNDED",
    "Adapters",
    "ChunkedLocalAttention",
    "CrossAttention",
    "FullAttention",
    "ImageFeatures",
    "LocalAttention",
    "NoTable",
    "Policy",
    "PromptBudget",
    "SlidingWindow",
    "StateCheckpoints",
    "TokenBudget",
    "VerifiedStates",
]

"""What a layer group needs to keep: one small class for each kind of layer (Jenga, section 5).

`base` has the rules, `attention` the layers that read the tokens before them, `state_checkpoints` recurrent layers,
`verified_states` those of theirs that verify drafts, `images` what encoders make of images, be it embeddings or K and V
of cross-attention, `adapters` low-rank adapters (`no_table` is what the two have in common), `encoder` cross-attention
whose K and V belong to one request, `budget` layers that keep a fixed number of tokens, `prompt_budget` those that keep
a fixed number of the prompt's. Layers that read another layer's KV
(cross-layer sharing) own no block and need no policy: they are not counted in `GroupSpec.num_layers`. A draft model's
layers are one more group of `FullAttention`.
"""

from jpaged.memory.policies.adapters import Adapters
from jpaged.memory.policies.attention import ChunkedLocalAttention, FullAttention, LocalAttention, SlidingWindow
from jpaged.memory.policies.base import UNBOUNDED, Policy
from jpaged.memory.policies.budget import TokenBudget
from jpaged.memory.policies.encoder import CrossAttention
from jpaged.memory.policies.images import ImageFeatures
from jpaged.memory.policies.prompt_budget import PromptBudget
from jpaged.memory.policies.state_checkpoints import StateCheckpoints
from jpaged.memory.policies.verified_states import VerifiedStates

__all__ = [
    "UNBOUNDED",
    "Adapters",
    "ChunkedLocalAttention",
    "CrossAttention",
    "FullAttention",
    "ImageFeatures",
    "LocalAttention",
    "Policy",
    "PromptBudget",
    "SlidingWindow",
    "StateCheckpoints",
    "TokenBudget",
    "VerifiedStates",
]

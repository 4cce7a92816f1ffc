"""Model families as Flax NNX modules, one file each: `llama`, `llama4`, `gemma`, `cohere2`, `opt`.

A family implements `jpaged.model_api.CausalLM`. The shared pieces: `decoder` (all but the layers), `layers`
(dots, norms, MLPs, vocabulary), `experts` (routed MLPs), `attention` (fused projections), `rope` (rotary tables),
`stack` (unrolled or scanned layers), `groups` (which layer keeps which KV memory) and `weights` (checkpoint tensors
to parameters). Families are found through the entry-point group ``jpaged.models``; nothing is imported here, so
that finding one does not load the others.
"""

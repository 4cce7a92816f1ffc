"""Holds model families as Flax NNX modules, a file each (`llama`, `gemma`, `jamba`) or a row (`families`).

A family implements `jpaged.model_api.CausalLM` and is built with a `BuildContext`, which it hands to its parts. They
share `decoder` (all but the layers), `pre_norm` (the usual layer), `linear` (the one place that multiplies), `layers`
(norms and MLPs), `experts` and `routing` (routed MLPs), `attention` (fused projections), `recurrent` (which
replaces it in recurrent layers), `latent` (attention to latents), `rope` (rotary tables), `stack` (unrolled or scanned
layers), `groups` (which layer keeps which memory), `config_reader` (config.json and a family's defaults), `weights`
(checkpoint tensors to parameters) and `vision` (encoders of images). Families are found through the entry-point group
``jpaged.models``; nothing is imported here, so that finding one does not load the others.
"""

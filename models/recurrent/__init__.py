"""Holds the mixers of recurrent layers: `mamba1`, `mamba2`, `delta_net`, `short_conv`.

A mixer stands where `attention.Attention` would: ``out, cache = mixer(x, shared, cache, ref, attend)``. It projects a
token, convolves each channel over the tokens before (`convolution`), and has the engine run a kernel of
`pallas_kernels.recurrent` from the state that its `state_parts` describe. Heads or channels are split over the tensor
shards (`slots`), so that all but the projection out of a mixer, and what is said there, stays on its device.
"""

"""Holds the kinds of layers, and the pool of what they keep.

`base` has the interface, `LayerCache`; `attention` and `prompt_budget` are kinds, `registry` lists them, and `pool`
cuts device memory for those of a model.
"""

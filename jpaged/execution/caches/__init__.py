"""The kinds of layers, and the pool that holds their state.

`base` has the interface, `LayerCache`; `registry` lists the kinds; `pool` cuts device memory for those of a model; the
other modules are kinds.
"""

"""Compares orders of eviction from the prefix cache on what services are asked, and tells what lengths of outputs would
be worth if they were known: the real scheduler and memory manager over the serving simulation's machine.

`workloads` makes requests that share prefixes over time, `prefix_modes` runs each order on each of them,
`output_lengths` runs schedulers that are told lengths, `page` and `plot` write docs/eviction.md.
"""

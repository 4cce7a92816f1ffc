"""Simulates serving over time: the real scheduler and memory manager, and step times from a roofline.

Requests arrive by a seeded Poisson process; a step lasts as long as its bytes and operations take on a device that is
not here. Read in this order: machine, models, workload, policies, hybrid_policies, beams, simulation, curves; then the
experiments (paged_experiments, hybrid_models, hybrid_experiments, own_experiments), run, which keeps their results,
and tables, paged_sections, hybrid_sections, own_sections, kept_sections, page and plots, which write
docs/serving-sim.md.
"""

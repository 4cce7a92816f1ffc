"""Serves requests that arrive over time on the real engine: `jpaged bench serving`.

Read in this order: workload (what is asked), reservation and policies (how the one engine is made to serve), host (the
engine, and a run on it), measures (what a run gave), experiments (which runs there are), peer_engine and peers (other
engines at the same arrivals), then tables, page and plots.
"""

"""Counts read in programs that compilers make for TPUs and NVIDIA GPUs; no device is needed, so they are no benchmarks.

``python -m scripts.compiled_code CASE`` runs a case in the environment of its compiler, which `scripts/aot_env.sh`
makes on first use."""

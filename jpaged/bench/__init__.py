"""Measures an engine (`throughput`) and any OpenAI-compatible server (`serve`): the commands of `jpaged bench`."""

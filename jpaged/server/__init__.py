"""Has the OpenAI-compatible HTTP server. It sees `jpaged.AsyncLLM` and the public names beside it, nothing below.

`protocol/` holds the bodies of requests, `endpoints/` what is done with them, `message/` how a model's text becomes an
answer's parts, and `memory_page/` draws the pool live in a browser; `app` puts them together and `process` runs them
until a signal or the engine's end.
"""

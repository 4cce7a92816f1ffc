"""The OpenAI-compatible HTTP server. It uses `jpaged.AsyncLLM` and the package's public names, nothing below them.

`app` builds the ASGI app from `middleware`, `endpoints/` (a router a file) and `memory_page/`; `process` runs it until
a signal or the engine's end. `protocol/` has the bodies of requests, `messages/` splits a model's text into an answer's
parts, `responses/` stores the responses of `/v1/responses`, and `serving` is the state that all endpoints share.
"""

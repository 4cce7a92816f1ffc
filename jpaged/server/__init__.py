"""The HTTP server. It uses `jpaged.AsyncLLM` and the package's public names, nothing below them.

`app` builds the ASGI app from `middleware`, `endpoints/` (a router a file) and `memory_page/`; `process` runs it until
a signal or the engine's end. Each protocol is a folder (`openai/`, `anthropic/`), whose row `protocols` lists. A
protocol makes a turn (`turn`) of a request and renders the events of its answer; `messages/` splits a model's text into
them, and `serving` is the state that all endpoints share.
"""

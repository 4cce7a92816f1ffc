"""The engine's loop and its surroundings: tokens in, tokens out. `jpaged.text` turns text into tokens and back.

`builder` puts an engine together; `memory_plan` sizes its pool. `engine` schedules, dispatches and reads back; a
`replica` holds one pool's state, `request_registry` the requests, `pinned_prefixes` the prefixes kept in all pools, and
`recovery` rebuilds the state after an error. `generate` and `pooled` answer batches in the caller's thread. `thread`
runs an engine for `AsyncLLM`, and `async_stream` delivers its tokens to coroutines. `owner` and `control` are the parts
of `LLM` and `AsyncLLM` that concern the engine rather than a prompt.
"""

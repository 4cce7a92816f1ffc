"""The engine's loop and what surrounds it: tokens in, tokens out. Text is the business of `jpaged.text`.

`builder` puts an engine together (`memory_plan` sizes its pool), `engine` schedules, dispatches and reads back,
`replica` is what it keeps for each pool, `pinned_prefixes` what stays in all of them. `offline` answers batches in the
caller's thread; `thread` owns an engine for `AsyncLLM`, and `mailbox` carries outputs to its coroutines.
"""

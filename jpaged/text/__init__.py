"""Text at the engine's borders, in the caller's thread. Host only: nothing here imports jax.

`input_processor` turns prompts (`prompt`, `batch`) and parameters into requests, through `chat_template`, `grammar`
(`grammar_dialects`, `grammar_limits`; GBNF by `gbnf`, `gbnf_rules`, `gbnf_lexer` and `gbnf_lark`) and `token_hooks`.
`token_reader` tells what a request generated since it was last read, in the engine's thread; `output_processor` makes
outputs and deltas of that, over `IncrementalDecoder` of `detokenizer`. Of text the engine's thread makes only that of
requests with stop strings, by `detokenizer`.
"""

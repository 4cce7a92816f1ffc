"""The state of an engine between two steps as a value: captured, written, read, checked and taken up again.

Each room turns its own part into plain data and back (`jpaged.memory.saving`, `jpaged.scheduling.saving`,
`jpaged.execution.transfer.pool_blocks`, `InputProcessor.data`). Here `capture` puts them together, `folder` writes and
reads them, `identity` says of which model they are, `loading` lets an engine go on from them; `keeper` is what `LLM`
and `AsyncLLM` use of it all, `handle` gives `LLM` its methods, `periodic` saves again and again. Plain data, no
pickles:
a state that somebody else wrote can be wrong, but runs nothing.
"""

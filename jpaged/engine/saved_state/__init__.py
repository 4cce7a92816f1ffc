"""The state of an engine between two steps as a value: captured, written, read, checked and restored.

Each package turns its own part into plain data and back (`jpaged.memory.saving`, `jpaged.scheduling.saving`,
`jpaged.execution.transfer.pool_blocks`, `InputProcessor.data`). Here `capture` joins them, `folder` writes and reads
them, `identity` names the model they belong to, `incremental` skips blocks that the last save has, and `load` restores
an engine. `keeper` is the entry for `EngineControl`. The files hold plain data and no pickles: a forged state can be
wrong, but it runs no code.
"""

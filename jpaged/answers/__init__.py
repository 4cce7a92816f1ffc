"""Forms of answers: what of an output is a thought, text or a tool call, by one row a model family.

A room of the host: it knows text, no tokens' arrays and no protocol.
"""

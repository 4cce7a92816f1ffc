"""Splits the text that a model writes into an answer's parts: what is said, what was thought, which tools are called.

A `Reader` gets one output's text as it grows and gives the parts that are settled, so that streams and whole answers go
the same way.
"""

from jpaged.server.messages.parts import CallArguments, CallStart, Content, Part, PlainReader, Reader, Reasoning

__all__ = ["CallArguments", "CallStart", "Content", "Part", "PlainReader", "Reader", "Reasoning"]

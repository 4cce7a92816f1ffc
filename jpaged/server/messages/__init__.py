"""Splits the text that a model writes into the parts of an answer: content, thoughts and tool calls.

A `Reader` (parts.py) takes one output's text as it grows and returns the parts that no later text can change, so that a
stream and a whole answer are read alike. thoughts.py and tool_calls.py each hold a table: a row names the marks and the
parser of one model family. turn_form.py applies a turn to both, and answer_reader.py makes its events of the parts.
"""

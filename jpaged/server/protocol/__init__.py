"""Holds the bodies of requests, under OpenAI's names and, for what OpenAI lacks, vLLM's.

Every field is honoured or refused with its name: unknown ones by pydantic, those that OpenAI has and the engine cannot
do by `refused` of the body that has them. A field that is null counts as not given.
"""

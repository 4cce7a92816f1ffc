"""The bodies of requests, with OpenAI's names of fields and, for further features, vLLM's.

Every field has an effect or is refused by name, except those that docs/serving.md lists: unknown fields by pydantic,
unsupported fields of OpenAI by the attribute `refused` of their body. A field that is null counts as missing.
"""

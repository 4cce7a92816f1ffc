"""Has the OpenAI-compatible HTTP server. It sees `jpaged.AsyncLLM` and the public names beside it, nothing below.

`memory_page/` draws the pool live in a browser.
"""

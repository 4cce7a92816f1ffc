"""The generating paths of OpenAI's API, and those of vLLM that have its form."""

"""Anthropic's API of messages: its row, the bodies of requests, the rendering of answers, and its router."""

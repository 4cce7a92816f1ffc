"""Joins jpaged to other libraries; each module needs an extra of its own, and nothing else imports it."""

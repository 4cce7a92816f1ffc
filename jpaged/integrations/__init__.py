"""Joins jpaged to other libraries: each module but `padding` needs an extra of its own, and nothing else imports it."""

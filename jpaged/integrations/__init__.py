"""Joins jpaged to other libraries. Each needs an extra of its own, and no other room imports one."""

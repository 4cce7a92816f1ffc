"""Joins jpaged to other libraries. Each needs its own extra, and no other room imports one."""

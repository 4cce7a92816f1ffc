"""Holds the command line: `main` has the commands, `options` what they share, `plan` and `bench` the larger ones."""

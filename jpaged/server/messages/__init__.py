"""Turns of one model: template options, grammar and reader of its answers, whose forms are in `jpaged.answers`."""

"""Turns with one model: template options, grammar, and events of its answers, whose forms are in `jpaged.answers`."""

"""``python -m scripts.compiled_code CASE``."""

from scripts.compiled_code.registry import COMPILED

COMPILED.main()

"""Lets tests of this folder import what they share, and the scripts that make the pages."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parents[1] / "scripts")]  # behind what is installed: scripts/ray is not Ray

"""The name that `jpaged.integrations.ray` had in 0.2: it warns, and stands for the package of today until 0.4."""

import sys
import warnings
from importlib import import_module

warnings.warn(
    "jpaged.server.ray is jpaged.integrations.ray since 0.3, and goes with 0.4", DeprecationWarning, stacklevel=2
)
# By its name: the server imports no room above it, and this is no part of the server.
sys.modules[__name__] = import_module("jpaged.integrations.ray")

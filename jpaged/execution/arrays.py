"""Names what both sides of a device call name alike."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from jaxtyping import Array

HostOrDevice: TypeAlias = np.ndarray | Array
"""NumPy where the host fills a batch in, traced JAX arrays inside the step."""

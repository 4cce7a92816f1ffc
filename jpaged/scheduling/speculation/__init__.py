"""Drafts: which tokens a step verifies beside those that are sure to be computed, and how many are worth it.

Host only. `Speculation` is what the scheduler asks; `NGramSpeculation` looks drafts up in the sequence itself,
`DeviceSpeculation` leaves them to the device.
"""

from jpaged.scheduling.speculation.base import Speculation, StepCosts
from jpaged.scheduling.speculation.device import DeviceSpeculation
from jpaged.scheduling.speculation.ngram import NGramSpeculation

__all__ = ["DeviceSpeculation", "NGramSpeculation", "Speculation", "StepCosts"]

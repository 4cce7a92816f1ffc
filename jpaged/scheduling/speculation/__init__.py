"""Drafts: guesses of next tokens that a step verifies in addition, and how many of them are worth their cost.

Host only. `Speculation` is the scheduler's interface; `NGramSpeculation` looks drafts up in the sequence itself,
`DeviceSpeculation` leaves them to the device.
"""

from jpaged.scheduling.speculation.base import Speculation, StepCosts
from jpaged.scheduling.speculation.device import DeviceSpeculation
from jpaged.scheduling.speculation.ngram import NGramSpeculation

__all__ = ["DeviceSpeculation", "NGramSpeculation", "Speculation", "StepCosts"]

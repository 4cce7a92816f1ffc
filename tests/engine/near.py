"""Log-probabilities that another batch computes again, which may differ in their last bits."""

from __future__ import annotations


class Near(float):
    """A number that equals others within 1e-3. Rounded numbers would not do: two that are near round to different
    ones where a boundary lies between them."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and (float.__eq__(self, other) or abs(float(self) - float(other)) <= 1e-3)

    def __ne__(self, other: object) -> bool:
        return not self == other

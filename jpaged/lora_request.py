"""Names the low-rank adapter of a request, with vLLM's name and fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from jpaged.validation import integer
from jpaged.vllm_refusals import refuse_parameters, with_vllms_attributes


@with_vllms_attributes
@dataclass(frozen=True)
class LoRARequest:
    """A low-rank adapter (LoRA; Hu et al., 2021) in a PEFT folder.

    Attributes:
        lora_name: the adapter's name; it stands for the same folder as long as the engine lives.
        lora_int_id: a positive number, which vLLM requires; jpaged does not use it.
        lora_path: the folder; empty for an adapter that the engine already knows by its name.

    Raises:
        ValueError: the name is empty, the number is not positive, or the path is not a string.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""

    def __new__(cls, *_: Any, **given: Any) -> Self:
        refuse_parameters("LoRARequest", given)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if not (isinstance(self.lora_name, str) and self.lora_name):
            raise ValueError(f"lora_name={self.lora_name!r} must be a non-empty string")
        integer("lora_int_id", self.lora_int_id, low=1)
        if not isinstance(self.lora_path, str):
            raise ValueError(f"lora_path={self.lora_path!r} must be a string")

    @property
    def name(self) -> str:
        """Return `lora_name`."""
        return self.lora_name

    @property
    def path(self) -> str:
        """Return `lora_path`."""
        return self.lora_path

    @property
    def adapter_id(self) -> int:
        """Return `lora_int_id`."""
        return self.lora_int_id

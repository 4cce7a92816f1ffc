"""Vision encoders: pictures' pixels in, vectors of the language model's width out.

`encoder` has what they share; `siglip` is the encoder of Gemma 3 and LLaVA-OneVision, `mllama` that of Llama 3.2
Vision; `projectors` lead from an encoder's width to the language model's. All take batches of images and are split over
tensor shards by heads and by columns of the MLP.
"""

from .mllama import MllamaProjector, MllamaVision
from .projectors import Gemma3Projector, LlavaOnevisionProjector
from .siglip import SiglipVision

__all__ = ["Gemma3Projector", "LlavaOnevisionProjector", "MllamaProjector", "MllamaVision", "SiglipVision"]

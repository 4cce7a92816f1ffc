"""Vision towers: pictures' pixels in, vectors of the language model's width out.

`family` puts a tower around a text model; `tower` has the parts of those that take packed rows of patches, `siglip`
those with learned positions. `mllama` takes images one by one, of the parts that `encoder` has. All are split over
tensor shards by heads and by columns of the MLP.
"""

from .mllama import MllamaProjector, MllamaVision

__all__ = ["MllamaProjector", "MllamaVision"]

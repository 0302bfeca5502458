"""Converted models of transformers: `MHLALlamaForCausalLM`, `MHLABertModel`, `MHLAViTModel`, ..., made on first use.

The source file that is saved with a checkpoint (`checkpoints/bundle.py`) has one of the functions `*_class` as its module
`__getattr__`, and only the code that this function needs.
"""

from dataclasses import replace
from functools import partial

from ..nn.core import MHLA
from ..nn.salient import SalientCore
from ..nn.sequence import SequenceMHLA
from ..nn.two_way import TwoWayMHLA
from .derived_classes import find_derived_class
from .encoder.encoder_attention import ENCODER_SWAP
from .families import ENCODERS, LANGUAGE, VISION
from .language.causal_attention import MATRIX_SWAP, WINDOWED_SWAP
from .vision.grid_attention import GRID_SWAP

matrix_class = partial(find_derived_class, kinds=((LANGUAGE, replace(MATRIX_SWAP, matrix_core=MHLA)),))
windowed_class = partial(find_derived_class, kinds=((LANGUAGE, replace(WINDOWED_SWAP, windowed_core=SalientCore)),))
matrix_encoder_class = partial(find_derived_class, kinds=((ENCODERS, replace(ENCODER_SWAP, matrix_core=SequenceMHLA)),))
windowed_encoder_class = partial(
    find_derived_class, kinds=((ENCODERS, replace(ENCODER_SWAP, windowed_core=TwoWayMHLA)),)
)
vision_class = partial(find_derived_class, kinds=((VISION, GRID_SWAP),))

LANGUAGE_SWAP = replace(WINDOWED_SWAP, matrix_core=MHLA, windowed_core=SalientCore)
TEXT_SWAP = replace(ENCODER_SWAP, matrix_core=SequenceMHLA, windowed_core=TwoWayMHLA)
# In the installed package: makes every converted class, with matrix cores and windowed cores.
__getattr__ = partial(find_derived_class, kinds=((LANGUAGE, LANGUAGE_SWAP), (ENCODERS, TEXT_SWAP), (VISION, GRID_SWAP)))

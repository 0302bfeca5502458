"""Converted models of transformers: `MHLALlamaForCausalLM`, `MHLABertModel`, `MHLAViTModel`, ..., made on first use.

A checkpoint's source has one of the functions `*_class` as its `__getattr__`, with only what that one uses.
"""

from dataclasses import replace
from typing import Any

from ..nn.core import MHLA
from ..nn.local import DecayMHLA, TwoWayMHLA
from ..nn.sequence import SequenceMHLA
from .derived_classes import find_derived_class
from .encoder.encoder_attention import ENCODER_SWAP
from .families import ENCODERS, LANGUAGE, VISION
from .language.causal_attention import CAUSAL_SWAP
from .vision.grid_attention import GRID_SWAP

LANGUAGE_SWAP = replace(CAUSAL_SWAP, matrix_core=MHLA, decay_core=DecayMHLA)
MATRIX_SWAP = replace(CAUSAL_SWAP, matrix_core=MHLA)
DECAY_SWAP = replace(CAUSAL_SWAP, decay_core=DecayMHLA)
TEXT_SWAP = replace(ENCODER_SWAP, matrix_core=SequenceMHLA, decay_core=TwoWayMHLA)
MATRIX_ENCODER_SWAP = replace(ENCODER_SWAP, matrix_core=SequenceMHLA)
DECAY_ENCODER_SWAP = replace(ENCODER_SWAP, decay_core=TwoWayMHLA)


def matrix_class(name: str) -> Any:
    return find_derived_class(name, (LANGUAGE, MATRIX_SWAP))


def decay_class(name: str) -> Any:
    return find_derived_class(name, (LANGUAGE, DECAY_SWAP))


def matrix_encoder_class(name: str) -> Any:
    return find_derived_class(name, (ENCODERS, MATRIX_ENCODER_SWAP))


def decay_encoder_class(name: str) -> Any:
    return find_derived_class(name, (ENCODERS, DECAY_ENCODER_SWAP))


def vision_class(name: str) -> Any:
    return find_derived_class(name, (VISION, GRID_SWAP))


def __getattr__(name: str) -> Any:
    """Return any of these classes, with the cores of both mixing forms."""
    return find_derived_class(name, (LANGUAGE, LANGUAGE_SWAP), (ENCODERS, TEXT_SWAP), (VISION, GRID_SWAP))

"""Converted text encoders: `MHLABertModel`, `MHLABertForSequenceClassification`, ..., made on first use.

The bundler makes the source file of a checkpoint from this module and what it refers to.
"""

from typing import Any

from ..derived_classes import find_derived_class
from ..families import ENCODERS
from .encoder_attention import ENCODER_SWAP


def __getattr__(name: str) -> Any:
    """Return the MHLA class of this name, which is created on first use; raise AttributeError if there is none."""
    return find_derived_class(name, ENCODERS, ENCODER_SWAP)

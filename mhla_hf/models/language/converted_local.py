"""Converted language models that mix by decays: `converted.py` without the other core, for the source of checkpoints."""

from dataclasses import replace
from typing import Any

from ...nn.local import DecayMHLA
from ..derived_classes import find_derived_class
from ..families import LANGUAGE
from .causal_attention import CAUSAL_SWAP

DECAY_SWAP = replace(CAUSAL_SWAP, decay_core=DecayMHLA)


def __getattr__(name: str) -> Any:
    """Return the MHLA class of this name, which is created on first use; raise AttributeError if there is none."""
    return find_derived_class(name, LANGUAGE, DECAY_SWAP)

"""Converted language models that mix by matrices: `converted.py` without the other core, for the source of checkpoints."""

from dataclasses import replace
from typing import Any

from ...nn.core import MHLA
from ..derived_classes import find_derived_class
from ..families import LANGUAGE
from .causal_attention import CAUSAL_SWAP

DENSE_SWAP = replace(CAUSAL_SWAP, matrix_core=MHLA)


def __getattr__(name: str) -> Any:
    """Return the MHLA class of this name, which is created on first use; raise AttributeError if there is none."""
    return find_derived_class(name, LANGUAGE, DENSE_SWAP)

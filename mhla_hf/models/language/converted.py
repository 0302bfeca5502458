"""Converted language models: `MHLALlamaForCausalLM`, `MHLAQwen3ForCausalLM`, ..., made on first use.

The installed package uses this module. A checkpoint contains one of `converted_local.py` and `converted_dense.py` instead
(`AttentionKind.sources`): the bundler keeps what a module refers to, and a model needs the core of its mixing form only.
"""

from dataclasses import replace
from typing import Any

from ...nn.core import MHLA
from ...nn.local import DecayMHLA
from ..derived_classes import find_derived_class
from ..families import LANGUAGE
from .causal_attention import CAUSAL_SWAP

LANGUAGE_SWAP = replace(CAUSAL_SWAP, matrix_core=MHLA, decay_core=DecayMHLA)


def __getattr__(name: str) -> Any:
    """Return the MHLA class of this name, which is created on first use; raise AttributeError if there is none."""
    return find_derived_class(name, LANGUAGE, LANGUAGE_SWAP)

"""What type checkers are told of `import mhla_hf`: `_PUBLIC` of `__init__.py`, and that further names exist."""

from typing import Any, Literal, overload

import torch

from .conversion import convert as convert
from .evaluation.runner import evaluate as evaluate
from .hub.push import push as push
from .models.language.configuration import MHLAConfig as MHLAConfig
from .models.language.language_model import MHLAForCausalLM as MHLAForCausalLM
from .models.language.language_model import MHLAModel as MHLAModel
from .models.vision.vision_configuration import MHLAVisionConfig as MHLAVisionConfig
from .models.vision.vision_model import MHLAForImageClassification as MHLAForImageClassification
from .models.vision.vision_model import MHLAVisionModel as MHLAVisionModel
from .nn.settings import MHLASettings as MHLASettings
from .ops.api import OutputAndState
from .ops.api import mhla_step as mhla_step
from .ops.blocks import Blocks as Blocks
from .ops.state import MHLAState as MHLAState
from .sampling import use_mhla_in_steps as use_mhla_in_steps
from .training.adapters import adapter_config as adapter_config
from .training.adapters import load_adapter as load_adapter
from .training.adapters import save_adapter as save_adapter
from .training.loop import distill as distill

__version__: str
__all__: list[str]

def __getattr__(name: str) -> Any: ...  # the classes of families
@overload
def mhla(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mixing: torch.Tensor, *, blocks: Blocks,
    key_blocks: Blocks | None = None, causal: bool = False, normalize: bool | str = True, scale: float | None = None,
    q_den: torch.Tensor | None = None, k_den: torch.Tensor | None = None, key_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None, starts: torch.Tensor | None = None, unrounded: bool = False,
    return_state: Literal[False] = False, impl: str = "auto",
) -> torch.Tensor: ...  # fmt: skip
@overload
def mhla(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mixing: torch.Tensor, *, blocks: Blocks,
    key_blocks: Blocks | None = None, causal: bool = False, normalize: bool | str = True, scale: float | None = None,
    q_den: torch.Tensor | None = None, k_den: torch.Tensor | None = None, key_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None, starts: torch.Tensor | None = None, unrounded: bool = False,
    return_state: Literal[True], impl: str = "auto",
) -> OutputAndState: ...  # fmt: skip

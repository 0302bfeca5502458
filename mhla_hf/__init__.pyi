"""What type checkers are told of `import mhla_hf`: `_PUBLIC` of `__init__.py`, and that further names exist."""

from typing import Any, Literal, overload

import torch

from .analysis import analyze as analyze
from .conversion import convert as convert
from .evaluation.runner import evaluate as evaluate
from .models.configuration import MHLAConfig as MHLAConfig
from .models.language import MHLAForCausalLM as MHLAForCausalLM
from .models.language import MHLAForQuestionAnswering as MHLAForQuestionAnswering
from .models.language import MHLAForSequenceClassification as MHLAForSequenceClassification
from .models.language import MHLAForTokenClassification as MHLAForTokenClassification
from .models.language import MHLAModel as MHLAModel
from .models.vision import MHLAForImageClassification as MHLAForImageClassification
from .models.vision import MHLAVisionModel as MHLAVisionModel
from .models.vision_configuration import MHLAVisionConfig as MHLAVisionConfig
from .nn.settings import MHLASettings as MHLASettings
from .ops.api import OutputAndState
from .ops.api import mhla_step as mhla_step
from .ops.blocks import Blocks as Blocks
from .ops.state import MHLAState as MHLAState
from .planning import plan as plan
from .sampling import use_mhla_in_steps as use_mhla_in_steps
from .share.audit import audit as audit
from .share.push import push as push
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

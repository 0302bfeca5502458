"""How a sequence core takes the place of softmax inside an encoder of transformers, unchanged around it.

As in language models the base keeps its projections and its RoPE and calls "the attention function", which is ours in the
converted modules alone. Which tokens are padding travels from the body to the layers as a keyword argument (`pass_rows`).
"""

import torch
from torch import nn
from transformers.modeling_utils import AttentionInterface

from ..nn.local import TwoWayMHLA
from ..nn.sequence import SequenceMHLA
from ..nn.settings import MHLASettings
from ..ops.namespace import NAMESPACE
from .overlay import attention_sizes, calls_interface, overlay_class, prepare_inner_body, swap_attention
from .transformers_api import set_attention_function

ENCODER_ATTENTION_NAME = f"mhla_encoder_{NAMESPACE}"


def mhla_encoder_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """The attention function of converted encoder layers: q, k, v `[B, H, T, K]`; o is `[B, T, H, V]`.

    `attention_mask` is not read: `mhla_rows` says the same without T x T numbers.
    """
    if kwargs.get("cu_seq_lens_q") is not None:
        raise ValueError(
            "cu_seq_lens_q: it came for an MHLA layer of an encoder, expected rows with an attention_mask."
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    starts, key_mask = kwargs.get("mhla_rows") or (None, None)
    options = {"starts": starts, "key_mask": key_mask, "hidden_states": kwargs["mhla_hidden_states"], "scale": scaling}
    return module.mhla(q, k, v, **options).contiguous(), None  # as some bases view it


AttentionInterface.register(ENCODER_ATTENTION_NAME, mhla_encoder_attention)


class MHLAEncoderMixer:
    """Mixed into an encoder's attention class of transformers; the module has a child `mhla`."""

    def forward(self, hidden_states, *args, **kwargs):
        """As the base, with the layer's input for the gate."""
        return super().forward(hidden_states, *args, mhla_hidden_states=hidden_states, **kwargs)


def encoder_attentions(model: nn.Module) -> dict[int, nn.Module]:
    """The attention modules of an encoder, by their place in it."""
    found = [one for one in model.modules() if hasattr(one, "mhla") or calls_interface(type(one))]
    return dict(enumerate(found))


def install_encoder_mhla(model: nn.Module, settings: MHLASettings) -> None:
    """Turn the attention modules that `settings.layers` lists into MHLA, in place; `model` is a body, or a head on one."""
    config = model.config
    attentions, core_class = encoder_attentions(model), TwoWayMHLA if settings.local else SequenceMHLA
    for index in settings.layers:
        attention = attentions[index]
        core = core_class(settings, hidden_size=config.hidden_size, **attention_sizes(attention, config))
        mixed = overlay_class(type(attention), MHLAEncoderMixer, "models.converted_encoder")
        swap_attention(attention, mixed, core, ENCODER_ATTENTION_NAME)
    if len(settings.layers) == len(attentions):
        set_attention_function(config, ENCODER_ATTENTION_NAME)  # which makes no T x T mask
    prepare_inner_body(model, pass_rows)


def pass_rows(body: nn.Module, args: tuple, kwargs: dict, names: tuple):
    """Before a body runs, whose forward takes `names`: say which tokens are padding to the layers below.

    Adds `mhla_rows`, a pair: first real token of each row `[B]` (None where all begin with one), real tokens `[B, T]`. Where
    rows are padded on the left, counts positions from the first real token, unless the caller did, so that a padded row
    equals the row alone.
    """
    kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    mask = kwargs.get("attention_mask")
    if mask is None:
        return (), kwargs
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        got = f"{mask.ndim} axes" if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask: got {got}, expected [batch, length] for an encoder with MHLA layers.")
    real, length = mask.bool(), mask.shape[1]
    reading = not torch.compiler.is_compiling()
    if reading and bool(real.all()):
        return (), kwargs
    if reading and bool(real[:, 0].all()):
        return (), {**kwargs, "mhla_rows": (None, real)}
    starts = torch.where(real.any(1), real.int().argmax(1), length)
    if kwargs.get("position_ids") is None:
        places = torch.arange(length, device=mask.device) - starts[:, None]
        kwargs["position_ids"] = places.clamp_min(0) + first_position(body)
    return (), {**kwargs, "mhla_rows": (starts, real)}


def first_position(body: nn.Module) -> int:
    """The number of the first position: RoBERTa and its kin count from the one after their padding token's."""
    embeddings = getattr(body, "embeddings", None)
    return embeddings.padding_idx + 1 if hasattr(embeddings, "create_position_ids_from_input_ids") else 0

"""Image classifiers from scratch (section 5.1): the paper's DeiT with average pooling, and its hierarchical MHLA-VLT."""

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.initialization import trunc_normal_, zeros_
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..pretrained import MHLAPreTrainedMixin
from .vision_configuration import MHLAVisionConfig
from .vision_layers import ConvStem, GridPositions, MHLAVisionBlock, MHLAVisionStage, PatchStem, as_map, as_tokens

PREPROCESSOR_FILE = "preprocessor_config.json"


class MHLAVisionPreTrainedModel(MHLAPreTrainedMixin, PreTrainedModel):
    """Base class of the image classifiers from scratch: loading, saving, and initial weights."""

    config: MHLAVisionConfig
    source_entry = "models.vision.vision_model"
    base_model_prefix = "model"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    _no_split_modules = ["MHLAVisionBlock"]
    _can_record_outputs = {"hidden_states": MHLAVisionBlock}
    _supports_sdpa = True
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module: Any) -> None:
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            trunc_normal_(module.weight, std=self.config.initializer_range)
            if module.bias is not None:
                zeros_(module.bias)
        elif isinstance(module, GridPositions):
            trunc_normal_(module.weight, std=self.config.initializer_range)
        else:
            super()._init_weights(module)

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save as `MHLAPreTrainedMixin` does, and write `preprocessor_config.json` unless there is one already."""
        target = Path(save_directory) / PREPROCESSOR_FILE
        if kwargs.get("is_main_process", True) and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(json.dumps(self.config.preprocessing(), indent=2) + "\n", encoding="utf-8")
        super().save_pretrained(save_directory, *args, **kwargs)


class MHLAVisionModel(MHLAVisionPreTrainedModel):
    """Maps images [B, channels, height, width] to tokens [B, T, width] and their average [B, width], without a head."""

    def __init__(self, config: MHLAVisionConfig) -> None:
        super().__init__(config)
        stages = config.stage_list()
        first, last = stages[0]["hidden_size"], stages[-1]["hidden_size"]
        self.stem = (PatchStem if config.stem == "patch" else ConvStem)(config, first)
        self.positions = None
        if config.positions == "learned":
            sides = config.padded_sides(*config.image_sides())
            self.positions = GridPositions(first, [-(-side // config.patch_size) for side in sides])
        self.stages = nn.ModuleList(MHLAVisionStage(config, number) for number in range(len(stages)))
        if config.feature_size:
            self.features = nn.Sequential(nn.Conv2d(last, config.feature_size, 1), nn.BatchNorm2d(config.feature_size))
        else:
            self.norm = nn.LayerNorm(last, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.stem

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self, pixel_values: torch.Tensor, interpolate_pos_encoding: bool = True, **kwargs: object
    ) -> BaseModelOutputWithPooling:
        """Return `last_hidden_state` [B, T, width] and `pooler_output` [B, width] of images.

        Args:
            pixel_values: [B, channels, height, width]. With the "patch" stem and without `pad_to_blocks`, height and width
                are multiples of the patch size; otherwise they may have any value.
            interpolate_pos_encoding: Whether to resize learned positions to other grids. If not, other grids raise an error.
            **kwargs: Further arguments of the blocks.

        Raises:
            ValueError: The images do not have this shape, or learned positions do not fit their grid.
        """
        x = self.stem(self.padded(pixel_values))
        grid = tuple(x.shape[2:])
        x = as_tokens(x)
        if self.positions is not None:
            trained_grid = tuple(self.positions.weight.shape[2:])
            if not interpolate_pos_encoding and grid != trained_grid:
                expected = f"{trained_grid}, or interpolate_pos_encoding=True"
                raise ValueError(f"pixel_values: got a grid of {grid} tokens, expected {expected}.")
            x = x + self.positions(grid)
        for stage in self.stages:
            x, grid = stage(x, grid, **kwargs)
        if self.config.feature_size:
            x = as_tokens(F.silu(self.features(as_map(x, grid))))
            pooled = x.mean(1)
        elif self.config.pool_first:
            pooled = self.norm(x.mean(1))
        else:
            x = self.norm(x)
            pooled = x.mean(1)
        return BaseModelOutputWithPooling(last_hidden_state=x, pooler_output=pooled)

    def padded(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Cast images to the model's dtype, and pad them with zeros on all sides if `config.pad_to_blocks`."""
        if pixel_values.ndim != 4 or pixel_values.shape[1] != self.config.num_channels:
            expected = f"[B, {self.config.num_channels}, height, width]"
            raise ValueError(f"pixel_values: got shape {tuple(pixel_values.shape)}, expected {expected}.")
        height, width = pixel_values.shape[-2:]
        unit = self.config.patch_size if self.config.stem == "patch" and not self.config.pad_to_blocks else 1
        if height % unit or width % unit:
            raise ValueError(
                f"pixel_values: got {height} x {width} pixels, expected multiples of the patch size {unit}."
            )
        rows, columns = self.config.padded_sides(height, width)
        extra_rows, extra_columns = rows - height, columns - width
        left, top = extra_columns // 2, extra_rows // 2
        x = pixel_values.to(self.dtype)
        return F.pad(x, (left, extra_columns - left, top, extra_rows - top))


class MHLAForImageClassification(MHLAVisionPreTrainedModel):
    """Classifies images: maps [B, channels, height, width] to logits [B, num_labels] and, with labels, a loss."""

    def __init__(self, config: MHLAVisionConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = MHLAVisionModel(config)
        width = config.feature_size or config.hidden_size
        self.classifier = nn.Linear(width, config.num_labels) if config.num_labels else nn.Identity()
        self.post_init()

    @can_return_tuple
    def forward(
        self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: object
    ) -> ImageClassifierOutput:
        """Return `logits` [B, num_labels] of images, a `loss` if there are labels [B], and `hidden_states` if requested."""
        outputs = self.model(pixel_values, **kwargs)
        logits = self.classifier(outputs.pooler_output)
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        return ImageClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)

"""Estimate the memory and FLOPs of a recipe's stages from the sizes of a model, without its weights."""

from typing import Any

from torch import nn

from .output_head import CPU_CHUNK, GPU_CHUNK
from .recipe import CommonStage, Recipe
from .run_folder import NUM_KEPT_STATES
from .trainable import set_trainable

FP32_BYTES = 4


def count_active_parameters(model: Any) -> int:
    """Return the number of parameters that each token uses.

    In a mixture of experts, only the experts that a token is routed to are counted.

    Args:
        model: A transformers model, which may be on the meta device.
    """
    config = model.config
    experts_per_token = getattr(config, "num_experts_per_tok", None)
    count_fields = ("num_local_experts", "num_experts", "n_routed_experts")
    expert_counts = {getattr(config, field, None) for field in count_fields if experts_per_token}
    active = 0
    for parameter in model.parameters():
        if parameter.ndim == 3 and parameter.shape[0] in expert_counts:  # the stacked matrices of all experts
            active += parameter.numel() * experts_per_token // len(parameter)
        else:
            active += parameter.numel()
    return active


def estimate_costs(student: Any, recipe: Recipe, parameters: int, active: int, tflops: float | None) -> dict[str, Any]:
    """Estimate the memory, FLOPs and hours that the stages of a recipe take in a single process.

    Args:
        student: The converted language model, on the meta device. Its `requires_grad` flags are changed.
        recipe: A recipe whose stages have `seq_len`.
        parameters: Number of parameters of the softmax original.
        active: Number of these that one token uses; see `count_active_parameters`.
        tflops: Speed of the machine in TFLOP/s, or None.

    Returns:
        A dict with
            - "stages": a list of dicts with "name", "tokens", "trained" (number of parameters), "memory" (bytes by
              purpose), "flops" and "disk" (bytes of the states that a run keeps);
            - "memory": the largest total memory of a stage, in bytes;
            - "flops": the FLOPs of all stages, without the products of attention with its keys and values;
            - "tflops": as given;
            - "hours": the estimated time, or None without `tflops`.
    """
    # Bytes per number in matrix products and in the teacher's weights.
    element_size = 2 if recipe.run.get("mixed_precision") == "bf16" else FP32_BYTES
    checkpointed = recipe.run.get("gradient_checkpointing", False)
    converted = [module for module in student.modules() if hasattr(module, "mhla")]
    attention_parameters = sum(x.numel() for module in converted for x in module.parameters())
    stages = []
    for stage in recipe.stages:
        set_trainable(student, stage, {})
        trained = sum(x.numel() for x in student.parameters() if x.requires_grad)
        tokens = stage.steps * stage.batch_size * stage.seq_len
        activations = estimate_activation_bytes(student, stage, element_size, checkpointed)
        if element_size == 2:  # autocast keeps bfloat16 copies of the trained weights
            activations += 2 * trained
        memory = {
            "weights": FP32_BYTES * student.num_parameters(),
            "gradients": FP32_BYTES * trained,
            "moments": 2 * FP32_BYTES * trained,
            "teacher": element_size * parameters * stage.needs_teacher,
            "activations": activations,
            "logits": estimate_logit_bytes(student, stage, element_size),
        }
        # Multiply and add per weight and token: once in the forward pass, twice in the backward pass.
        if stage.loss == "transfer":
            student_weights = attention_parameters
        else:
            student_weights = active + student.num_parameters() - parameters
        teacher_weights = active if stage.needs_teacher else 0
        flops = (6 * student_weights + 2 * teacher_weights) * tokens
        disk = count_disk(student.num_parameters(), trained, stage)
        sizes = {"tokens": tokens, "trained": trained, "memory": memory, "flops": flops, "disk": disk}
        stages.append({"name": stage.name, **sizes})
    return add_up_stages(stages, tflops)


def count_disk(parameters: int, trained: int, stage: CommonStage) -> int:
    """Return the bytes of the states that a run keeps: weights, moments, and the average of `ema`.

    Args:
        parameters: Number of the student's parameters.
        trained: Number of those that the stage trains.
        stage: The stage.
    """
    return NUM_KEPT_STATES * FP32_BYTES * (parameters + (3 if stage.ema else 2) * trained)


def add_up_stages(stages: list[dict[str, Any]], tflops: float | None) -> dict[str, Any]:
    """Return the dict that `estimate_costs` describes, from the dicts of its stages."""
    total_flops = sum(stage["flops"] for stage in stages)
    peak_memory = max(sum(stage["memory"].values()) for stage in stages)
    hours = None if tflops is None else total_flops / (tflops * 1e12) / 3600
    return {"stages": stages, "memory": peak_memory, "flops": total_flops, "tflops": tflops, "hours": hours}


def estimate_activation_bytes(student: Any, stage: Any, element_size: int, checkpointed: bool) -> int:
    """Return the bytes of activations that the student's layers keep for the backward pass of one micro-batch.

    The estimate is for PyTorch's own operators, not for MHLA's Triton kernels.

    Args:
        student: The converted model.
        stage: Its loss, batch size, accumulation and sequence length are used.
        element_size: Bytes per number in matrix products.
        checkpointed: Whether gradient checkpointing is on.
    """
    config = student.config
    tokens = stage.batch_size // stage.grad_accum * stage.seq_len
    cores = [module.mhla for module in student.modules() if hasattr(module, "mhla")]
    core = cores[0]
    width = config.hidden_size
    layers = config.num_hidden_layers
    qkv_width = core.num_heads * core.q_map.head_dim + core.num_kv_heads * (core.k_map.head_dim + core.value_dim)
    if stage.loss == "transfer":  # attention alone: q, k and v, and the error of each output
        score_gradients = 3 * FP32_BYTES * count_window_scores(core)  # only of the core that runs backward
        per_core = (estimate_mhla_activation_bytes(core) + element_size * qkv_width + 12 * width for core in cores)
        return tokens * (score_gradients + sum(per_core))
    mlp_width = getattr(config, "intermediate_size", None) or 4 * width
    mlp_width *= getattr(config, "num_experts_per_tok", None) or 1
    # The inputs of two norms and of the projections behind them; an MLP's gate, up, activation and product; q, k and v.
    layer = 28 * width + element_size * (4 * mlp_width + qkv_width)
    if checkpointed:  # the input of each layer, and all of the one layer that is recomputed
        return tokens * (FP32_BYTES * width * layers + layer + max(map(estimate_mhla_activation_bytes, cores)))
    return tokens * (layer * layers + sum(map(estimate_mhla_activation_bytes, cores)))


def estimate_mhla_activation_bytes(core: Any) -> int:
    """Return the bytes per token that an MHLA core stores for the backward pass, in fp32, in addition to q, k and v."""
    heads = core.num_heads
    kv_heads = core.num_kv_heads
    features = core.k_map.num_features
    value_dim = core.value_dim
    decays, block_size = core.settings.num_decays, core.settings.block_size
    numbers = (2 + decays) * heads * features + 2 * kv_heads * features + (3 * heads + kv_heads) * value_dim
    numbers += 4.5 * decays * kv_heads * features * (value_dim + 1) / block_size  # states at the ends of blocks
    if hasattr(core, "form"):  # scores within the window and their mask, and its keys and values
        scores = count_window_scores(core)
        numbers += 1.25 * scores + scores * 2 * kv_heads * value_dim / block_size / heads
    return round(FP32_BYTES * numbers)


def count_window_scores(core: Any) -> int:
    """Return the number of attention scores per token in a core's softmax window, over all heads; 0 without a window."""
    form = getattr(core, "form", None)
    return 0 if form is None else core.num_heads * (form.lag * form.block_size + form.sinks)


def estimate_logit_bytes(student: Any, stage: Any, element_size: int) -> int:
    """Return the peak bytes of logits and of the tensors that the loss computes from them.

    With a linear output head, only the logits of one chunk exist at a time, in fp32 (see `output_head`). Otherwise all
    logits of a micro-batch exist at once. The loss "transfer" computes no logits.

    Args:
        student, stage, element_size: See `estimate_activation_bytes`.
    """
    if stage.loss == "transfer":
        return 0
    tokens = stage.batch_size // stage.grad_accum * stage.seq_len
    vocab_size = student.config.vocab_size
    whole_distribution = stage.loss == "logits" and not stage.top_k
    if type(student.get_output_embeddings()) is not nn.Linear:
        return (4 if whole_distribution else 3) * tokens * vocab_size * element_size
    chunk = CPU_CHUNK if element_size == FP32_BYTES else GPU_CHUNK
    rows = min(tokens, max(1, chunk // vocab_size))
    return (12 if whole_distribution else 9) * FP32_BYTES * rows * vocab_size

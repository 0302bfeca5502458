"""What the stages of a recipe take: memory and operations, counted without weights."""

from torch import nn

from .output_head import CHUNK, GPU_CHUNK
from .trainable import choose_trainable


def active_parameters(model):
    """The parameters that a token meets: of experts as many as it is sent to."""
    config = model.config
    sent = getattr(config, "num_experts_per_tok", None)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = {getattr(config, name, None) for name in names if sent}
    sizes = ((value.numel(), value.ndim == 3 and value.shape[0] in experts, len(value)) for value in model.parameters())
    return sum(size * sent // count if routed else size for size, routed, count in sizes)


def work_of(student, recipe, parameters, active, tflops):
    """Memory of each stage of a recipe, in a single process, and its operations except attention's own products.

    student: converted, on the meta device. parameters, active: of its original, and those that a token meets.
    """
    number = (
        2 if recipe.run.get("mixed_precision") == "bf16" else 4
    )  # bytes of the arithmetic and of the teacher's weights
    checkpointed = recipe.run.get("gradient_checkpointing", False)
    converted = [module for module in student.modules() if hasattr(module, "mhla")]
    worked = {"transfer": sum(x.numel() for module in converted for x in module.parameters())}
    stages = []
    for stage in recipe.stages:
        choose_trainable(student, stage, {})
        trained = sum(x.numel() for x in student.parameters() if x.requires_grad)
        tokens = stage.steps * stage.batch_size * stage.seq_len
        taught = active if stage.needs_teacher else 0
        memory = {
            "weights": 4 * student.num_parameters(),
            "gradients": 4 * trained,
            "moments": 8 * trained,
            "teacher": number * parameters * stage.needs_teacher,
            "activations": activations_of(student, stage, number, checkpointed) + (number == 2) * 2 * trained,
            "logits": logits_of(student, stage, number),
        }
        flops = (6 * worked.get(stage.loss, active + student.num_parameters() - parameters) + 2 * taught) * tokens
        stages.append({"name": stage.name, "tokens": tokens, "trained": trained, "memory": memory, "flops": flops})
    flops = sum(stage["flops"] for stage in stages)
    most = max(sum(stage["memory"].values()) for stage in stages)
    hours = None if tflops is None else flops / (tflops * 1e12) / 3600
    return {"stages": stages, "memory": most, "flops": flops, "tflops": tflops, "hours": hours}


def activations_of(student, stage, number, checkpointed) -> int:
    """Bytes that the student's layers keep for the backward pass of one part of a batch, with PyTorch's own operators.

    number: bytes of a number in matrix products. checkpointed: with gradient checkpointing.
    """
    config, tokens = student.config, stage.batch_size // stage.grad_accum * stage.seq_len
    cores = [module.mhla for module in student.modules() if hasattr(module, "mhla")]
    core, width, layers = cores[0], config.hidden_size, config.num_hidden_layers
    heads = core.num_heads * core.q_map.head_dim + core.num_kv_heads * (core.k_map.head_dim + core.value_dim)
    if stage.loss == "transfer":  # the attentions alone: q, k and v, and the error of each output
        gradients = 3 * 4 * scores_in_window(core)  # of one core's scores, on their way back
        return tokens * (gradients + sum(mhla_activations(one) + number * heads + 12 * width for one in cores))
    inner = getattr(config, "intermediate_size", None) or 4 * width
    inner *= getattr(config, "num_experts_per_tok", None) or 1
    # what two norms and the projections behind them read; an MLP's gate, up, activation and product; q, k and v
    layer = 28 * width + number * (4 * inner + heads)
    if checkpointed:  # the input of each layer, and one layer's own
        return tokens * (4 * width * layers + layer + max(map(mhla_activations, cores)))
    return tokens * (layer * layers + sum(map(mhla_activations, cores)))


def mhla_activations(core) -> int:
    """The same, of one MHLA core for one token, beside its q, k and v: in fp32."""
    heads, groups, features, value = core.num_heads, core.num_kv_heads, core.k_map.num_features, core.value_dim
    decays, block = core.settings.num_decays, core.settings.block_size
    kept = (2 + decays) * heads * features + 2 * groups * features + (3 * heads + groups) * value
    kept += 4.5 * decays * groups * features * (value + 1) / block  # states at the ends of blocks
    if hasattr(core, "form"):  # scores within the window and their mask, and its keys and values
        scores = scores_in_window(core)
        kept += 1.25 * scores + scores * 2 * groups * value / block / heads
    return round(4 * kept)


def scores_in_window(core) -> int:
    """Scores of the softmax window of an MHLA core, for one token."""
    form = getattr(core, "form", None)
    return 0 if form is None else core.num_heads * (form.lag * form.block_size + form.sinks)


def logits_of(student, stage, number) -> int:
    """Bytes of the logits that exist at a time and of what the loss makes of them; "transfer" makes none.

    Behind a linear head they are those of a chunk, in fp32; else those of one part of a batch.
    """
    if stage.loss == "transfer":
        return 0
    tokens, vocab = stage.batch_size // stage.grad_accum * stage.seq_len, student.config.vocab_size
    whole = stage.loss == "logits" and not stage.top_k
    if type(student.get_output_embeddings()) is not nn.Linear:
        return (4 if whole else 3) * tokens * vocab * number
    rows = min(tokens, max(1, (CHUNK["cpu"] if number == 4 else GPU_CHUNK) // vocab))
    return (12 if whole else 9) * 4 * rows * vocab

"""The start of a converted language model from a text: calibrated on it, and with softmax where it is missed most."""

import logging

import torch

from ..convert.keep import choose_layers, keep_softmax
from ..convert.start import calibrate
from ..data import open_text

logger = logging.getLogger("mhla_hf")
ROWS, BATCHES, MOST_TOKENS = 4, 24, 1024


def start_from_text(
    model: torch.nn.Module, tokenizer: object, text: object, budget: int | str | None = None, seed: int = 0,
    progress: bool = True,
) -> None:  # fmt: skip
    """`calibrate` on a text, and with a budget `choose_layers` and `keep_softmax` too; in place.

    Args:
        model: a language model that was just converted, best in all its layers. tokenizer: its own.
        text: as `training.data.open_text` takes it; some 100,000 tokens are enough.
        budget: how many layers may keep softmax, or how many bytes ("64MiB") the cache of a sequence may have at the length
            of the model. None: none but those that `convert` left.
        seed: of the choice of passages. progress: show bars on stderr.

    What was measured is then in `model.config.mhla_measured`, and so in config.json: "calibration" and "choice". ValueError,
    TypeError: one sentence.
    """
    context = model.config.max_position_embeddings
    limit = {} if budget is None else parse_budget(str(budget))
    source = open_text(text, tokenizer, vocab_size=model.get_input_embeddings().weight.shape[0])
    reader = source.reader(min(MOST_TOKENS, context), seed, 0)
    batches = [reader.take(ROWS)[0] for _ in range(BATCHES)]
    measured = {"calibration": calibrate(model, batches, progress=progress)}
    logger.info("KL to the teacher: {kl_start:.4f}, calibrated {kl:.4f} nats".format(**measured["calibration"]))
    if limit:
        measured["choice"] = choose_layers(model, batches[-2:], context=context, progress=progress, **limit)
        keep_softmax(model, measured["choice"]["kept"])
        logger.info("softmax stays in layers %s", measured["choice"]["kept"])
    model.config.mhla_measured = measured


def parse_budget(text: str) -> dict[str, int]:
    """`4` as {"keep": 4}, `64MiB` as {"cache_bytes": ...}. ValueError, one sentence, for anything else."""
    count = text.removesuffix("MiB")
    if not count.isdecimal():
        raise ValueError(f"budget: got {text!r}, expected a number of layers, or bytes such as 64MiB.")
    return {"keep": int(count)} if count == text else {"cache_bytes": int(count) << 20}

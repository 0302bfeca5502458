"""A web page where a model and its conversion answer side by side, in turns, so that each runs alone while it is timed."""

import contextlib
import html
import inspect
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from .checkpoints.load import is_pipeline, load_language_model, load_pipeline, require_extra
from .conversion.model_family import TRANSFORMERS
from .evaluation.speed import cache_bytes, clock
from .facts import draw_facts
from .models.transformers_api import forward_cached
from .training.adapters import load_adapter
from .training.pipeline_calls import MILLISECONDS_PER_FRAME

with require_extra("compare", "Gradio", "compare"):
    import gradio
    import pandas

MIB = 2**20
FIRST_LENGTH = 256  # tokens at the first point of the plots; each next one has twice as many
TIMED_TOKENS = 4  # per point, of which the fastest counts
MAX_POSITIONS = 32_768  # at most, whatever the models have
COLORS = {"MHLA": "#f97316", "softmax": "#64748b"}
TURNS: dict[str, Any] = {"concurrency_id": "models", "concurrency_limit": 1}  # a second visitor waits
BAR = """<div style="background: var(--border-color-primary); border-radius: 7px"><div style="background:
var(--color-accent); height: 14px; border-radius: 7px; margin-left: {:.1f}%"></div></div>"""


def build_page(
    original: str, converted: str, dtype: str = "auto", device: str | None = None, trust_remote_code: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> gradio.Blocks:  # fmt: skip
    """Load both models and build the page.

    Args:
        original: Folder or Hub id of a softmax language model, or of a pipeline.
        converted: Folder or Hub id of its conversion; for a language model also the folder of an adapter.
        dtype: "float32", "bfloat16", "float16", or "auto", the stored one.
        device: Device as torch names it (default: cuda if there is one, else cpu).
        trust_remote_code: Whether to run source from the folders, which converted pipelines hold.
        settings: Arguments of the pipelines, such as `{"num_frames": 33}`.

    Raises:
        ValueError: A model cannot be loaded, is not the kind that is expected, or takes no `settings`.
    """
    options: dict[str, Any] = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
    if is_pipeline(original):
        pipelines = {"MHLA": load_pipeline(converted, **options), "softmax": load_pipeline(original, **options)}
        return build_pipeline_page(pipelines, settings or {})
    if settings:
        raise ValueError(f"settings: got {settings}, expected none for language models.")
    model, tokenizer = load_language_model(original, **options)
    is_adapter = (Path(converted) / "adapter_config.json").is_file()
    other: Any = load_language_model(original if is_adapter else converted, **options)[0]
    other = load_adapter(other, converted).merge_and_unload() if is_adapter else other
    return LanguagePage(model, other, tokenizer).build()


@torch.inference_mode()
def run_timed(model: Any, ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any, float]:
    """Return the most likely next token [1, 1], the cache after `ids` [1, T], and the seconds that this took."""
    start = clock(model.device)
    output, cache = forward_cached(model, ids.to(model.device), cache, logits_to_keep=1)
    token = output.logits[:, -1:].argmax(-1)
    return token, cache, clock(model.device) - start


def generate(model: Any, ids: torch.Tensor, num_tokens: int) -> Iterator[tuple[list[int], str]]:
    """Generate greedily; after each token, yield the tokens so far and a line with speed and memory."""
    stop = model.generation_config.eos_token_id  # a number, a list, or None
    tokens: list[int] = []
    times: list[float] = []
    cache = None
    while len(tokens) < num_tokens:
        ids, cache, seconds = run_timed(model, ids, cache)
        times.append(seconds)
        if int(ids) == stop or (isinstance(stop, list) and int(ids) in stop):
            return
        tokens.append(int(ids))
        speed = f"{len(tokens[1:]) / sum(times[1:]):.1f} tokens/s · " if tokens[1:] else ""
        yield tokens, f"first token {times[0]:.2f} s · {speed}cache {cache_bytes(cache) / MIB:.1f} MiB"


def build_columns(models: Mapping[str, Any], make: Callable[..., Any]) -> list[Any]:
    """Add a column per model; return the components of all: an answer, as `make` makes it, and the figures below it."""
    outputs = []
    with gradio.Row():
        for name, model in models.items():
            with gradio.Column(min_width=300):
                outputs.append(make(label=f"{name}: {type(model).__name__}", elem_id=f"answer-{name}"))
                outputs.append(gradio.Markdown(elem_id=f"figures-{name}"))
    return outputs


class LanguagePage:
    """The page of two language models, which share a tokenizer."""

    def __init__(self, original: Any, converted: Any, tokenizer: Any) -> None:
        if getattr(converted.config, "mhla", None) is None:
            raise ValueError(f"converted: got {type(converted).__name__}, expected an MHLA model.")
        self.models = {"MHLA": converted, "softmax": original}
        self.tokenizer, self.has_template = tokenizer, bool(getattr(tokenizer, "chat_template", None))
        self.limit = min(getattr(original.config, "max_position_embeddings", None) or MAX_POSITIONS, MAX_POSITIONS)

    def encode(self, text: str, prompt: str, chat: bool) -> torch.Tensor:
        prompt = "\n\n".join(part for part in (text.strip(), prompt.strip()) if part)
        if chat:
            messages = [{"role": "user", "content": prompt}]
            prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        options = {"add_special_tokens": not chat, "return_tensors": "pt", "verbose": False}
        return self.tokenizer(prompt, **options)["input_ids"]

    def describe(self, text: str, prompt: str, chat: bool) -> str:
        """Describe the length of the prompt and where the window of its last token begins, as HTML."""
        tokens = self.encode(text, prompt, chat)[0] if (text + prompt).strip() else torch.empty(0)
        count, mhla = len(tokens), self.models["MHLA"].config.mhla
        line = f"{count:,} of {self.limit:,} tokens"
        start = max(0, (count - 1) // mhla["block_size"] - mhla["window"] + 1) * mhla["block_size"]
        if not (start and mhla["windowed"]):
            return f"{line}, all inside the window" if mhla["windowed"] else line
        words = html.escape(self.tokenizer.decode(tokens[start : start + 10]).strip())
        line += f". The window begins at “{words} …”; of the {start:,} tokens before it, converted heads keep "
        return f"{line}the first {mhla['sinks']} and {mhla['salient']} others.{BAR.format(100 * start / count)}"

    def hide_fact(self, text: str, chat: bool) -> tuple[Any, Any]:
        """Insert a code into the text, and return the text and the question for the code."""
        if not text.strip():
            gradio.Warning("Text: got none, expected one to hide a fact in.")
            return gradio.skip(), gradio.skip()  # an error would lock the fields
        fact = draw_facts(self.tokenizer, ["codes"], random.Random())[0]
        place = text.find(" ", len(text) // 4) + 1
        question = f"What is the {fact.start.removeprefix('The ').removesuffix(' is')}?" if chat else fact.start
        return f"{text[:place]}{fact.line.strip()} {text[place:]}", question

    def answer(self, text: str, prompt: str, chat: bool, num_tokens: float) -> Iterator[tuple[str, ...]]:
        """After each token, yield both answers, each followed by its figures."""
        if not (text + prompt).strip():
            raise gradio.Error("Prompt: got none, expected a text or a question.", print_exception=False)
        ids = self.encode(text, prompt, chat)
        if ids.shape[1] + num_tokens > self.limit:
            got = f"Text: got {ids.shape[1]:,} tokens and {int(num_tokens):,} new ones"
            raise gradio.Error(f"{got}, expected at most the model's {self.limit:,} positions.", print_exception=False)
        runs = {name: generate(model, ids, int(num_tokens)) for name, model in self.models.items()}
        answers: dict[str, tuple[list[int], str]] = dict.fromkeys(runs, ([], "waits for its turn"))
        while runs:
            for name in [*runs]:
                if (answer := next(runs[name], None)) is None:
                    del runs[name]
                else:
                    answers[name] = answer
                    yield tuple(x for ids, line in answers.values() for x in (self.tokenizer.decode(ids), line))

    def measure(self) -> Iterator[tuple[pandas.DataFrame, pandas.DataFrame]]:
        """After each length of random tokens, yield cache and time of a token by length, once for each plot."""
        vocabulary = min(model.config.get_text_config().vocab_size for model in self.models.values())
        ids = torch.randint(vocabulary, (1, self.limit), generator=torch.Generator().manual_seed(0))
        rows: list[dict[str, Any]] = []
        caches: dict[str, Any] = dict.fromkeys(self.models)
        seen, length = 0, FIRST_LENGTH
        while length <= self.limit:
            for name, model in self.models.items():
                chunks = ids[:, seen:length].split([length - seen - TIMED_TOKENS, *[1] * TIMED_TOKENS], 1)
                times = []
                for chunk in chunks:
                    _, caches[name], seconds = run_timed(model, chunk, caches[name])
                    times.append(1e3 * seconds)
                size = cache_bytes(caches[name]) / MIB
                rows.append({"tokens": length, "cache, MiB": size, "a new token, ms": min(times[1:]), "model": name})
            yield (frame := pandas.DataFrame(rows)), frame  # with both models: the first frame decides the legend
            seen, length = length, 2 * length

    def build(self) -> gradio.Blocks:
        with gradio.Blocks(analytics_enabled=False, title="MHLA beside softmax") as page:
            gradio.Markdown("## One prompt, two answers")
            text = gradio.Textbox(label="Text", lines=6, max_lines=12, placeholder="A long text (optional)")
            with gradio.Row():
                file = gradio.UploadButton("Open a text file", size="sm")
                hide = gradio.Button("Hide a fact in it and ask", size="sm")
            prompt: Any = gradio.Textbox(label="Prompt", lines=2, elem_id="prompt")
            counter = gradio.HTML(self.describe("", "", False), elem_id="counter")
            with gradio.Row():
                chat = gradio.Checkbox(self.has_template, label="Chat", visible=self.has_template, min_width=100)
                num_tokens = gradio.Slider(1, 512, 128, step=1, label="New tokens")
            with gradio.Row():
                ask: Any = gradio.Button("Answer", variant="primary")
                stop: Any = gradio.Button("Stop", variant="stop")
            outputs = build_columns(self.models, lambda **names: gradio.Textbox(lines=8, max_lines=16, **names))
            measure = gradio.Button("Measure both by length", size="sm")
            axes: Any = {"x": "tokens", "color": "model", "color_map": COLORS, "height": 240, "min_width": 300}
            with gradio.Row():
                plots = [gradio.LinePlot(y=y, **axes) for y in ("cache, MiB", "a new token, ms")]
            inputs: list[Any] = [text, prompt, chat]
            quick: dict[str, Any] = {"concurrency_limit": None, "show_progress": "hidden"}
            gradio.on(
                [field.change for field in inputs], self.describe, inputs, counter, trigger_mode="always_last", **quick
            )
            file.upload(lambda name: Path(name).read_text("utf-8", "replace"), file, text, **quick)
            hide.click(self.hide_fact, [text, chat], [text, prompt], **quick)
            answering = gradio.on([ask.click, prompt.submit], self.answer, [*inputs, num_tokens], outputs, **TURNS)
            measuring = measure.click(self.measure, None, plots, show_progress="minimal", **TURNS)
            stop.click(None, cancels=[answering, measuring])
        return page


def build_pipeline_page(pipelines: Mapping[str, Any], settings: Mapping[str, Any]) -> gradio.Blocks:
    """Build the page of two pipelines of diffusers, which are called with `settings`."""
    parameters = inspect.signature(type(pipelines["softmax"]).__call__).parameters
    if unknown := {*settings} - {*parameters}:
        caller = type(pipelines["softmax"]).__name__
        raise ValueError(f"settings: got {min(unknown)!r}, expected only arguments of {caller}.")
    by_class = "class_labels" in parameters
    label, expected = ("Class", "the number of a class") if by_class else ("Prompt", "a description")
    folder = tempfile.TemporaryDirectory()  # a picture per pipeline, of which Gradio keeps a copy

    def draw_both(prompt: str, seed: int, steps: int, bars: Any = gradio.Progress(track_tqdm=True)) -> Any:  # noqa: B008
        """Yield pictures and figures, first with one pipeline's, then with both."""
        if not (prompt.strip().isdecimal() if by_class else prompt.strip()):
            raise gradio.Error(f"{label}: got {prompt!r}, expected {expected}.", print_exception=False)
        options = {**settings, **({"class_labels": [int(prompt)]} if by_class else {"prompt": prompt})}
        shown: list[Any] = [None, "", None, ""]
        for index, pipeline in enumerate(pipelines.values()):
            shown[2 * index] = file = f"{folder.name}/{index}.webp"
            shown[2 * index + 1] = f"{draw(pipeline, file, int(steps), int(seed), options) / steps:.2f} s a step"
            yield tuple(shown)

    with gradio.Blocks(analytics_enabled=False, title="MHLA beside softmax") as page:
        gradio.Markdown("## One prompt and seed, two pictures")
        prompt: Any = gradio.Textbox(label=label, lines=2, elem_id="prompt")
        with gradio.Row():
            seed = gradio.Number(0, label="Seed", precision=0, minimum=0)
            steps = gradio.Slider(1, 100, 20, step=1, label="Steps")
        start: Any = gradio.Button("Draw", variant="primary")
        outputs = build_columns(pipelines, lambda **names: gradio.Image(type="filepath", **names))
        gradio.on([start.click, prompt.submit], draw_both, [prompt, seed, steps], outputs, **TURNS)
    return page


def draw(pipeline: Any, file: str, steps: int, seed: int, options: Mapping[str, Any]) -> float:
    """Save a sample, animated if a video; return the seconds from a transformer's first call to the end of the last one."""
    times: list[float] = []
    note = lambda module, *_: times.append(clock(module.device))  # noqa: E731
    modules = [module for name in TRANSFORMERS if (module := pipeline.components.get(name)) is not None]
    with contextlib.ExitStack() as hooks, torch.inference_mode():
        for module in modules:
            hooks.enter_context(module.register_forward_pre_hook(note))
            hooks.enter_context(module.register_forward_hook(note))
        generator = torch.Generator(modules[0].device).manual_seed(seed)
        result = pipeline(num_inference_steps=steps, generator=generator, **options)
    first, *rest = result.frames[0] if hasattr(result, "frames") else result.images[:1]
    first.save(file, save_all=True, append_images=rest, duration=MILLISECONDS_PER_FRAME, loop=0, quality=95)
    return times[-1] - times[0]

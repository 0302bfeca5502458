"""A web page where a model and its conversion answer side by side, for `mhla-hf compare` and for a Hugging Face Space.

Both generate in turns, token by token, so that the times are those of a model that runs alone.
"""

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
MAX_POSITIONS = 32_768  # for models without a limit
FACT_PLACE = 0.25  # of the text is before the hidden fact
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
        pipelines = [load_pipeline(name, **options) for name in (converted, original)]
        return build_pipeline_page({"MHLA": pipelines[0], "softmax": pipelines[1]}, settings or {})
    if settings:
        raise ValueError(f"settings: got {settings}, expected none for language models.")
    model, tokenizer = load_language_model(original, **options)
    if (Path(converted) / "adapter_config.json").is_file():
        adapted: Any = load_adapter(load_language_model(original, **options)[0], converted)
        return LanguagePage(model, adapted.merge_and_unload(), tokenizer).build()
    return LanguagePage(model, load_language_model(converted, **options)[0], tokenizer).build()


@torch.inference_mode()
def run_timed(model: Any, ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any, float]:
    """Return the most likely next token [1, 1], the cache after `ids` [1, T], and the seconds that this took."""
    start = clock(model.device)
    output, cache = forward_cached(model, ids.to(model.device), cache, logits_to_keep=1)
    token = output.logits[:, -1:].argmax(-1)
    return token, cache, clock(model.device) - start


def generate(model: Any, ids: torch.Tensor, num_tokens: int) -> Iterator[tuple[list[int], str]]:
    """Generate greedily; after each token, yield the tokens so far and a line with speed and memory."""
    stop = model.generation_config.eos_token_id
    stops = {stop} if isinstance(stop, int) else {*(stop or ())}
    tokens: list[int] = []
    times: list[float] = []
    cache = None
    while len(tokens) < num_tokens:
        ids, cache, seconds = run_timed(model, ids, cache)
        times.append(seconds)
        if int(ids) in stops:
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
        if not chat:
            return self.tokenizer(prompt, return_tensors="pt", verbose=False)["input_ids"]
        options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        return self.tokenizer.apply_chat_template([{"role": "user", "content": prompt}], **options)["input_ids"]

    def describe(self, text: str, prompt: str, chat: bool) -> str:
        """Describe the length of the prompt and where the window of its last token begins, as HTML."""
        tokens = self.encode(text, prompt, chat)[0] if (text + prompt).strip() else torch.empty(0)
        count, mhla = len(tokens), self.models["MHLA"].config.mhla
        line = f"{count:,} of {self.limit:,} tokens"
        if not mhla["windowed"]:
            return line
        start = max(0, (count - 1) // mhla["block_size"] - mhla["window"] + 1) * mhla["block_size"]
        if not start:
            return f"{line}, all inside the window"
        words = html.escape(self.tokenizer.decode(tokens[start : start + 10]).strip())
        kept = f"the first {mhla['sinks']} and {mhla['salient']} others"
        line += f". The window begins at “{words} …”; of the {start:,} tokens before it, converted heads keep {kept}."
        return line + BAR.format(100 * start / count)

    def hide_fact(self, text: str, chat: bool) -> tuple[Any, Any]:
        """Insert a code into the text, and return the text and the question for the code."""
        if not text.strip():
            gradio.Warning("Text: got none, expected one to hide a fact in.")
            return gradio.skip(), gradio.skip()  # an error would lock the fields
        fact = draw_facts(self.tokenizer, ["codes"], random.Random())[0]
        place = text.find(" ", int(FACT_PLACE * len(text))) + 1
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
                _, cache, _ = run_timed(model, ids[:, seen : length - TIMED_TOKENS], caches[name])
                times = []
                for place in range(length - TIMED_TOKENS, length):
                    _, cache, seconds = run_timed(model, ids[:, place : place + 1], cache)
                    times.append(seconds)
                caches[name], size = cache, cache_bytes(cache) / MIB
                rows.append({"tokens": length, "cache, MiB": size, "a new token, ms": 1e3 * min(times), "model": name})
            yield (frame := pandas.DataFrame(rows)), frame  # with both models: the first frame decides the legend
            seen, length = length, 2 * length

    def build(self) -> gradio.Blocks:
        with gradio.Blocks(analytics_enabled=False, title="MHLA beside softmax") as page:
            gradio.Markdown("## One prompt, two answers")
            text = gradio.Textbox(label="Text", lines=6, max_lines=12, placeholder="A long text (optional)")
            with gradio.Row():
                file = gradio.UploadButton("Open a text file", size="sm")
                hide = gradio.Button("Hide a fact in it and ask", size="sm")
            prompt = gradio.Textbox(label="Prompt", lines=2, elem_id="prompt")
            counter = gradio.HTML(self.describe("", "", False), elem_id="counter")
            with gradio.Row():
                chat = gradio.Checkbox(self.has_template, label="Chat", visible=self.has_template, min_width=100)
                num_tokens = gradio.Slider(1, 512, 128, step=1, label="New tokens")
            with gradio.Row():
                ask, stop = gradio.Button("Answer", variant="primary"), gradio.Button("Stop", variant="stop")
            outputs = build_columns(self.models, lambda **names: gradio.Textbox(lines=8, max_lines=16, **names))
            measure = gradio.Button("Measure both by length", size="sm")
            axes: Any = {"x": "tokens", "color": "model", "color_map": COLORS, "height": 240, "min_width": 300}
            with gradio.Row():
                plots = [gradio.LinePlot(y=y, **axes) for y in ("cache, MiB", "a new token, ms")]
            inputs = [text, prompt, chat]
            changes: Any = [text.change, prompt.change, chat.change]
            quick: dict[str, Any] = {"concurrency_limit": None, "show_progress": "hidden"}
            gradio.on(changes, self.describe, inputs, counter, trigger_mode="always_last", **quick)
            file.upload(lambda name: Path(name).read_text("utf-8", "replace"), file, text, **quick)
            hide.click(self.hide_fact, [text, chat], [text, prompt], **quick)
            asked: Any = [ask.click, prompt.submit]
            answering = gradio.on(asked, self.answer, [*inputs, num_tokens], outputs, **TURNS)
            measuring = measure.click(self.measure, None, plots, show_progress="minimal", **TURNS)
            stop.click(None, cancels=[answering, measuring])
        return page


def build_pipeline_page(pipelines: Mapping[str, Any], settings: Mapping[str, Any]) -> gradio.Blocks:
    """Build the page of two pipelines of diffusers, which are called with `settings`."""
    parameters = inspect.signature(type(pipelines["softmax"]).__call__).parameters
    if unknown := [name for name in settings if name not in parameters]:
        caller = type(pipelines["softmax"]).__name__
        raise ValueError(f"settings: got {unknown[0]!r}, expected only arguments of {caller}.")
    by_class = "class_labels" in parameters
    folder = tempfile.TemporaryDirectory()  # a picture per pipeline, of which Gradio keeps a copy

    def draw_both(prompt: str, seed: int, steps: int, bars: Any = gradio.Progress(track_tqdm=True)) -> Any:  # noqa: B008
        """Yield pictures and figures, first with one pipeline's, then with both."""
        if not (prompt.strip().isdecimal() if by_class else prompt.strip()):
            expected = "the number of a class" if by_class else "a description"
            raise gradio.Error(f"Prompt: got {prompt!r}, expected {expected}.", print_exception=False)
        inputs = {"class_labels": [int(prompt)]} if by_class else {"prompt": prompt}
        shown: list[Any] = [None, "", None, ""]
        for index, pipeline in enumerate(pipelines.values()):
            file = f"{folder.name}/{index}.webp"
            seconds = draw(pipeline, file, int(steps), int(seed), {**inputs, **settings})
            shown[2 * index : 2 * index + 2] = file, f"{seconds / steps:.2f} s a step"
            yield tuple(shown)

    with gradio.Blocks(analytics_enabled=False, title="MHLA beside softmax") as page:
        gradio.Markdown("## One prompt and seed, two pictures")
        prompt = gradio.Textbox(label="Class" if by_class else "Prompt", lines=2, elem_id="prompt")
        with gradio.Row():
            seed = gradio.Number(0, label="Seed", precision=0, minimum=0)
            steps = gradio.Slider(1, 100, 20, step=1, label="Steps")
        start = gradio.Button("Draw", variant="primary")
        outputs = build_columns(pipelines, lambda **names: gradio.Image(type="filepath", **names))
        started: Any = [start.click, prompt.submit]
        gradio.on(started, draw_both, [prompt, seed, steps], outputs, **TURNS)
    return page


def draw(pipeline: Any, file: str, steps: int, seed: int, options: Mapping[str, Any]) -> float:
    """Save a sample, animated if a video; return the seconds from a transformer's first call to the end of the last one."""
    times: list[float] = []
    note = lambda module, *_: times.append(clock(module.device))  # noqa: E731
    modules = [module for name in TRANSFORMERS if (module := pipeline.components.get(name)) is not None]
    handles = [h for x in modules for h in (x.register_forward_pre_hook(note), x.register_forward_hook(note))]
    try:
        generator = torch.Generator(modules[0].device).manual_seed(seed)
        with torch.inference_mode():
            result = pipeline(num_inference_steps=steps, generator=generator, **options)
    finally:
        for handle in handles:
            handle.remove()
    first, *rest = result.frames[0] if hasattr(result, "frames") else result.images[:1]
    first.save(file, save_all=True, append_images=rest, duration=MILLISECONDS_PER_FRAME, loop=0, quality=95)
    return times[-1] - times[0]

"""The page of `mhla-hf compare` in headless Chromium, and the Space that it writes."""

import re
import runpy
import shutil

import gradio
import pytest
import torch
from tools.small_scores import HELD_OUT, small_llama, small_tokenizer
from tools.tiny_pipelines import PIPELINES

import mhla_hf
from mhla_hf.cli.main import main
from mhla_hf.compare import build_page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH: apt-get install chromium")
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
POSITIONS = 4096
QUESTION = "What is a class?"
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    place = tmp_path_factory.mktemp("compared")
    changes = {"max_position_embeddings": POSITIONS, "eos_token_id": None}
    models = {"softmax": small_llama(**changes), "MHLA": small_llama(**changes)}
    mhla_hf.convert(models["MHLA"], block_size=32, window=2, salient=8)
    tokenizer = small_tokenizer()
    tokenizer.chat_template = TEMPLATE
    for name, model in models.items():
        model.save_pretrained(place / name)
        tokenizer.save_pretrained(place / name)
    return place, models, tokenizer


@pytest.fixture(scope="module")
def address(models):
    page = build_page(*(str(models[0] / name) for name in ("softmax", "MHLA")))
    yield page.launch(prevent_thread_lock=True, quiet=True)[1]
    page.close()


@pytest.fixture(scope="module")
def chromium():
    playwright = pytest.importorskip("playwright.sync_api").sync_playwright().start()
    browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
    yield browser
    browser.close()
    playwright.stop()


class Visitor:
    """A tab, with the addresses that it has asked for and its errors."""

    def __init__(self, browser, address, **options):
        self.page, self.asked, self.errors = browser.new_page(**options), [], []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(address)
        self.page.wait_for_selector("#prompt textarea")
        if (slider := self.page.get_by_role("spinbutton", name="New tokens")).count():
            slider.fill(str(NUM_TOKENS))
            slider.blur()

    def click(self, name):
        self.page.get_by_role("button", name=name).click()

    def fill(self, label, text):
        self.page.get_by_label(label, exact=True).last.fill(text)

    def value(self, selector):
        return self.page.input_value(f"{selector} textarea")

    def wait_for(self, selector, pattern):
        """Wait until the text of an element, or of the field in it, matches."""
        found = """([selector, pattern]) => [...document.querySelectorAll(selector)].some(element => {
            const text = element.querySelector('textarea')?.value ?? element.innerText ?? element.textContent
            return new RegExp(pattern).test(text.trim())})"""
        self.page.wait_for_function(found, arg=[selector, pattern], timeout=30_000)

    def wait_for_answers(self, models, text):
        """Wait for what `generate` of transformers begins with: the page may get the number of tokens late."""
        _, loaded, tokenizer = models
        ids = tokenizer(f"user: {text}\nassistant:", return_tensors="pt")["input_ids"]
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NUM_TOKENS, "do_sample": False}
        for name, model in loaded.items():
            answer = tokenizer.decode(model.generate(ids, **options)[0, ids.shape[1] :]).strip()
            self.wait_for(f"#answer-{name}", f"^{re.escape(answer)}")


@in_browser
def test_a_prompt_is_answered_by_both(models, address, chromium):
    visitor = Visitor(chromium, address)
    visitor.wait_for("#counter", "^0 of 4,096 tokens, all inside the window")
    visitor.fill("Prompt", QUESTION)
    visitor.click("Answer")
    visitor.wait_for("#figures-MHLA", r"^first token [\d.]+ s · [\d.]+ tokens/s · cache 0\.\d MiB$")
    visitor.wait_for_answers(models, QUESTION)
    visitor.click("Measure both by length")
    visitor.wait_for("svg text", "^cache, MiB$")
    visitor.wait_for("svg text", "^softmax$")  # the legend
    assert not visitor.errors and all(url.startswith((address, "data:", "blob:")) for url in visitor.asked)


@in_browser
def test_a_fact_in_a_long_text_is_asked_for(models, address, chromium, tmp_path):
    text = (3 * HELD_OUT)[:6000]
    (tmp_path / "long.txt").write_text(text, encoding="utf-8")
    visitor = Visitor(chromium, address)
    visitor.page.set_input_files("input[type=file]", str(tmp_path / "long.txt"))
    visitor.wait_for(
        "#counter", r"^[34],\d\d\d of .*The window begins at .*converted heads keep the first 4 and 8 others"
    )
    visitor.click("Hide a fact in it and ask")
    visitor.wait_for("#prompt", r"^What is the code of the \w+\?$")
    changed, thing = visitor.page.get_by_label("Text", exact=True).last.input_value(), visitor.value("#prompt")
    hidden = re.search(rf"The code of the {thing[24:-1]} is \d{{4}}\. ", changed)
    assert changed.replace(hidden[0], "") == text and 0.2 < hidden.start() / len(text) < 0.3
    visitor.click("Answer")
    visitor.wait_for_answers(models, f"{changed.strip()}\n\n{thing}")


@in_browser
def test_what_cannot_be_answered_is_a_sentence_in_the_page(address, chromium):
    visitor = Visitor(chromium, address)
    visitor.click("Answer")
    visitor.wait_for(".toast-wrap", r"Prompt: got none, expected a text or a question\.")
    visitor.click("Hide a fact in it and ask")
    visitor.wait_for(".toast-wrap", r"Text: got none, expected one to hide a fact in\.")
    visitor.fill("Text", HELD_OUT[:12_000])
    visitor.click("Answer")
    visitor.wait_for(
        ".toast-wrap", r"Text: got .* tokens and \d+ new ones, expected at most the model's 4,096 positions\."
    )


@in_browser
def test_two_visitors_take_turns_and_a_closed_tab_leaves(models, address, chromium):
    leaving, first, second = (Visitor(chromium, address) for _ in range(3))
    leaving.fill("Prompt", "Gone")
    leaving.click("Answer")
    leaving.wait_for("#answer-MHLA", r"\S")
    leaving.page.close()
    for visitor, question in ((first, QUESTION), (second, "And a function?")):
        visitor.fill("Prompt", question)
        visitor.click("Answer")
    first.wait_for_answers(models, QUESTION)
    second.wait_for_answers(models, "And a function?")


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_in_both_schemes(address, chromium, scheme):
    visitor = Visitor(chromium, address, viewport={"width": 390, "height": 844}, color_scheme=scheme)
    assert visitor.page.evaluate("document.documentElement.scrollWidth") <= 390
    boxes = [visitor.page.locator(f"#answer-{name}").bounding_box() for name in ("MHLA", "softmax")]
    assert boxes[1]["y"] > boxes[0]["y"] + boxes[0]["height"] and min(box["width"] for box in boxes) > 250
    color = visitor.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", color)[:3])) > 380) == (scheme == "light")


@in_browser
def test_two_pipelines_draw(chromium, tmp_path):
    pipe = PIPELINES["sana"]()
    pipe.save_pretrained(tmp_path / "sana")
    mhla_hf.convert(pipe).save_pretrained(tmp_path / "mhla")
    folders = [str(tmp_path / name) for name in ("sana", "mhla")]
    with pytest.raises(ValueError, match="settings: got 'hight', expected only arguments of SanaPipeline"):
        build_page(*folders, trust_remote_code=True, settings={"hight": 64})
    settings = {"height": 64, "width": 64, "use_resolution_binning": False}
    page = build_page(*folders, trust_remote_code=True, settings=settings)
    visitor = Visitor(chromium, page.launch(prevent_thread_lock=True, quiet=True)[1])
    visitor.click("Draw")
    visitor.wait_for(".toast-wrap", "Prompt: got '', expected a description")
    visitor.fill("Prompt", "a cat")
    visitor.click("Draw")
    for name in ("MHLA", "softmax"):
        visitor.wait_for(f"#figures-{name}", r"^[\d.]+ s a step$")
        visitor.page.wait_for_function(f"document.querySelector('#answer-{name} img').naturalWidth == 64")
    page.close()


def test_a_space_runs_as_it_stands(models, tmp_path, monkeypatch, capsys):
    folders = [str(models[0] / name) for name in ("softmax", "MHLA")]
    assert main(["compare", *folders, "--space", str(tmp_path / "space"), "--dtype", "bfloat16"]) == 0
    assert "name models on the Hub before you upload it" in capsys.readouterr().out
    readme = (tmp_path / "space/README.md").read_text(encoding="utf-8")
    assert f"\nsdk: gradio\nsdk_version: {gradio.__version__}\napp_file: app.py\n" in readme
    assert (
        tmp_path / "space/requirements.txt"
    ).read_text() == f"mhla_hf[compare,diffusers,peft]=={mhla_hf.__version__}\n"
    launched = []
    monkeypatch.setattr(gradio.Blocks, "launch", lambda page: launched.append(page.title))
    runpy.run_path(str(tmp_path / "space/app.py"), run_name="__main__")
    assert launched == ["MHLA beside softmax"]
    assert main(["compare", *folders, "--space", str(tmp_path / "space")]) == 2
    assert "mhla-hf compare: --space: got" in capsys.readouterr().err


def test_a_model_that_is_no_conversion_is_refused(models, capsys):
    folder = str(models[0] / "softmax")
    assert main(["compare", folder, folder]) == 2
    assert "converted: got LlamaForCausalLM, expected an MHLA model." in capsys.readouterr().err

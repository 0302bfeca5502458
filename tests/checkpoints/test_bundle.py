"""Folding a package into one source file, on small packages written here."""

import re
import textwrap

import torch
from tools.small_models import refused

from mhla_hf.checkpoints.bundle import build_bundle, check_bundle, fold


def folded(folder, files, entry="models.toy"):
    """The bundle of a package written here; keys are module paths, values source texts."""
    for where, text in {"__init__": '__version__ = "1.2.3"\n', **files}.items():
        path = folder / "toy" / f"{where}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return fold(folder / "toy", entry, "transformers")


def run(text):
    scope = {"__name__": "bundle"}
    exec(compile(text, "bundle.py", "exec"), scope)
    return scope


CHAIN = {
    "ops/low": """\
        '''Lowest room.'''
        import math
        from dataclasses import dataclass
        # why six
        SIX = 6  # inline reason
        @dataclass
        class Low:
            '''The first paragraph
            stays.

            Args:
                part: What follows does not.
            '''
            part: int = 0
            def root(self):
                return math.sqrt(SIX + 3)
        """,
    "models/toy": """\
        import math
        from dataclasses import asdict
        import torch
        from ..ops.low import (
            SIX,  # a comment inside
            Low,
        )
        class Top(torch.nn.Module):
            def forward(self, x):
                return torch.abs(x) * Low().root() + 2 * asdict(Low(SIX))["part"] * math.floor(1.5)
        """,
}


def test_order_imports_and_comments(tmp_path):
    text = folded(tmp_path, CHAIN)
    assert text.index("class Low") < text.index("class Top")
    assert text.count("import math\n") == 1 and text.index("import math") < text.index("import torch\n")
    assert "import math\nfrom dataclasses import asdict, dataclass\n" in text
    assert "# why six\nSIX = 6  # inline reason" in text
    assert "Lowest room" not in text and "a comment inside" not in text
    assert run(text)["Low"].__doc__.split() == ["The", "first", "paragraph", "stays."]
    assert not re.search(r"^\s*from\s+\.", text, re.MULTILINE)
    assert run(text)["Top"]()(-torch.ones(2)).tolist() == [15.0, 15.0]


def test_header_and_namespace(tmp_path):
    files = {"ops/namespace": 'NAMESPACE = "package"\n'}
    files["models/toy"] = "from ..ops.namespace import NAMESPACE\n\nKEY = 'mhla::' + NAMESPACE\n"
    text = folded(tmp_path, files)
    facts = check_bundle(text)
    assert facts["entry"] == "models.toy" and facts["version"] == "1.2.3" and facts["format"] == "1"
    scope = run(text)
    assert scope["NAMESPACE"] == facts["sha256"] and scope["KEY"] == f"mhla::{facts['sha256']}"
    assert text.count(facts["sha256"]) == 2
    files["models/toy"] = files["models/toy"].replace("KEY", "# a comment\nKEY")
    assert check_bundle(folded(tmp_path, files))["sha256"] != facts["sha256"]
    assert "Apache-2.0" in scope["__doc__"]


def test_changed_or_newer_bundle_is_noticed(tmp_path):
    text = folded(tmp_path, CHAIN)
    for changed, words in (
        (text.replace("SIX = 6", "SIX = 7"), "bundle that was edited and hashes to"),
        (text.replace("format: 1", "format: 2"), "got a bundle of format 2, expected at most 1"),
        ("import torch\n", "without a bundle's header"),
    ):
        with refused(words):
            check_bundle(changed)


def test_what_nothing_refers_to_is_left_out(tmp_path):
    """Statements that are no definition stay, and so does what they need; imports go with what needed them."""
    low = """\
        import math
        from functools import cache
        TABLE = {}
        LOST = math.pi  # nobody reads it
        GROWN = [1]
        GROWN += [2]
        def register(name):
            TABLE[name] = NAMES
        NAMES = ["a"]
        register("b")
        @cache
        def unused(x):
            return x
        class Kept:
            def f(self):
                def inner(y: "Kept"):
                    return helper(y)
                return inner
        def helper(y):
            return y
        """
    top = "from ..ops.low import Kept\n\n\ndef unread():\n    return Kept\n"
    text = folded(tmp_path, {"ops/low": low, "models/toy": top})
    scope = run(text)
    assert (scope["TABLE"], scope["GROWN"], scope["Kept"]().f()(3)) == ({"b": ["a"]}, [1, 2], 3) and scope["unread"]
    assert all(word not in text for word in ("LOST", "nobody", "unused", "import math", "cache"))


def test_an_old_transformers_is_told_which_one_is_needed(monkeypatch):
    """In one sentence, before an import that it lacks."""
    monkeypatch.setattr("transformers.__version__", "4.57.6")
    monkeypatch.delattr("transformers.cache_utils.LinearAttentionCacheLayerMixin")
    with refused("transformers: got 4.57.6, expected 5.19.0 or newer; ", kind=ImportError):
        run(build_bundle("models.converted:matrix_class"))

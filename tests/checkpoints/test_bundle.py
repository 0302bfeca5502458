"""Folding a package into one source file, on small packages written here.

Run: pytest tests/checkpoints/test_bundle.py
"""

import re
import subprocess
import sys
import textwrap

import pytest

from mhla_hf.checkpoints.bundle import check_bundle, fold

NAMESPACE = '"""Who this copy is."""\n\nNAMESPACE = "package"\n'


def make(folder, files, name="toy"):
    """Write a package; keys are module paths, values source texts."""
    package = folder / name
    for where, text in {"__init__": '__version__ = "1.2.3"\n', **files}.items():
        path = package / f"{where}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return package


def folded(folder, files, entry="models.toy", libraries=("transformers",)):
    return fold(make(folder, files), entry, libraries)


def run(text):
    scope = {"__name__": "bundle"}
    exec(compile(text, "bundle.py", "exec"), scope)
    return scope


CHAIN = {
    "ops/low": '''\
        """Lowest room."""

        import math
        from dataclasses import dataclass, field

        # why six
        SIX = 6  # inline reason


        @dataclass
        class Low:
            """A low thing."""

            parts: list = field(default_factory=list)

            def root(self):
                return math.sqrt(SIX + 3)
        ''',
    "nn/middle": '''\
        """Middle room.

        Several lines.
        """

        import math
        import torch.nn.functional as F
        from dataclasses import asdict
        from torch import nn

        from ..ops.low import (
            SIX,  # a comment inside
            Low,
        )


        class Middle(nn.Module):
            def forward(self, x):
                return F.relu(x) * SIX * math.pi


        def middle_dict():
            return asdict(Low([1]))
        ''',
    "models/toy": '''\
        """Top."""

        import torch
        from torch import nn

        from ..nn.middle import Middle, middle_dict
        from ..ops.low import Low


        class Top(nn.Module):
            def __init__(self):
                super().__init__()
                self.middle = Middle()

            def forward(self, x):
                return self.middle(torch.abs(x)) * Low().root() + middle_dict()["parts"][0]
        ''',
}


def test_a_folder_inside_a_room_is_folded(tmp_path):
    """Its files import siblings by one dot and the room's by two."""
    text = folded(
        tmp_path,
        {
            "ops/low": "LOW = 1\n",
            "ops/deep/first": "from ..low import LOW\n\nFIRST = LOW + 1\n",
            "ops/deep/second": "from .first import FIRST\n\nSECOND = FIRST + 1\n",
            "models/toy": "from ..ops.deep.second import SECOND\n\nTHIRD = SECOND + 1\n",
        },
    )
    names = {}
    exec(text, names)
    assert names["THIRD"] == 4 and "from ." not in text


def test_order_merge_and_comments(tmp_path):
    text = folded(tmp_path, CHAIN)
    assert text.index("class Low") < text.index("class Middle") < text.index("class Top")
    assert text.count("import math\n") == 1
    assert "from dataclasses import asdict, dataclass, field\n" in text
    assert text.count("from torch import nn\n") == 1
    assert "import torch.nn.functional as F\n" in text
    assert "# why six\nSIX = 6  # inline reason" in text
    assert "Lowest room" not in text and "Several lines" not in text and "a comment inside" not in text
    assert text.index("import math") < text.index("import torch\n")
    assert not re.search(r"^\s*from\s+\.", text, re.MULTILINE)


def test_folded_code_gives_the_packages_numbers(tmp_path, monkeypatch):
    import torch

    text = folded(tmp_path, CHAIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    from toy.models.toy import Top

    x = torch.randn(3, 4)
    assert torch.equal(run(text)["Top"]()(x), Top()(x))


def test_deterministic_in_another_process(tmp_path):
    text = folded(tmp_path, CHAIN)
    code = (
        "import sys, pathlib; from mhla_hf.checkpoints.bundle import fold; "
        f"sys.stdout.write(fold(pathlib.Path({str(tmp_path / 'toy')!r}), 'models.toy', ('transformers',)))"
    )
    for seed in ("1", "77"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        assert done.stdout == text


def test_header_and_namespace(tmp_path):
    files = {
        "ops/namespace": NAMESPACE,
        "models/toy": "from ..ops.namespace import NAMESPACE\n\nKEY = 'mhla::' + NAMESPACE\n",
    }
    text = folded(tmp_path, files)
    facts = check_bundle(text)
    assert facts["entry"] == "models.toy" and facts["version"] == "1.2.3" and facts["format"] == "1"
    scope = run(text)
    assert scope["NAMESPACE"] == facts["sha256"] and scope["KEY"] == f"mhla::{facts['sha256']}"
    assert text.count(facts["sha256"]) == 2
    files["models/toy"] += "# another comment\n"
    other = folded(tmp_path, files)
    assert check_bundle(other)["sha256"] != facts["sha256"]
    assert "Apache-2.0" in scope["__doc__"]


def test_changed_or_newer_bundle_is_noticed(tmp_path):
    text = folded(tmp_path, CHAIN)
    with pytest.raises(ValueError, match="changed after it was made"):
        check_bundle(text.replace("SIX = 6", "SIX = 7"))
    with pytest.raises(ValueError, match="format 2, this mhla_hf reads up to 1"):
        check_bundle(text.replace("format: 1", "format: 2"))
    with pytest.raises(ValueError, match="without its header"):
        check_bundle("import torch\n")


GUARD = """\
    try:
        import triton
        import triton.language as tl
    except ImportError:
        triton = None
        tl = None


    """


def test_guarded_import_stays_guarded_and_single(tmp_path):
    files = {
        "ops/one": GUARD + "def has_triton():\n        return triton is not None and tl is not None\n",
        "models/toy": "from ..ops.one import has_triton\n"
        + textwrap.dedent(GUARD)
        + "FOUND = [triton, tl, has_triton()]\n",
    }
    text = folded(tmp_path, files)
    assert text.count("import triton\n") == 1 and text.count("    import triton\n") == 1
    assert text.count("except ImportError") == 1
    blocker = "import sys\nsys.modules['triton'] = None\n"
    (tmp_path / "run.py").write_text(blocker + f"exec(open({str(tmp_path / 'b.py')!r}).read())\nprint(FOUND)\n")
    (tmp_path / "b.py").write_text(text)
    done = subprocess.run([sys.executable, str(tmp_path / "run.py")], capture_output=True, text=True, check=True)
    assert done.stdout == "[None, None, False]\n"


def test_reexport_and_conditional_definition(tmp_path):
    files = {
        "ops/low": "import sys\n\nif sys.version_info > (3, 0):\n    def pick():\n        return 1\nelse:\n"
        "    def pick():\n        return 2\n",
        "nn/middle": "from ..ops.low import pick\n\nOTHER = [name for name in 'ab']\n",
        "models/toy": "from ..nn.middle import OTHER, pick\n\nPICKED = [pick() for name in OTHER]\n",
    }
    assert run(folded(tmp_path, files))["PICKED"] == [1, 1]


def test_future_import_comes_first(tmp_path):
    files = {
        "ops/low": '"""Low."""\n\nfrom __future__ import annotations\n\nimport math\n\nX = math.pi\n',
        "models/toy": "from __future__ import annotations\n\nfrom ..ops.low import X\n\n\n"
        "def f(a: Undefined):\n    return X\n",
    }
    text = folded(tmp_path, files)
    assert text.count("__future__") == 1 and run(text)["f"](1) > 3


def test_strings_with_blank_lines_are_kept(tmp_path):
    source = 'import math\n\n\nTEXT = """a\n\n\n\nb"""\nN = math.e\n'
    assert run(folded(tmp_path, {"models/toy": source}))["TEXT"] == "a\n\n\n\nb"


LOW = "class Low:\n    pass\n\n\ndef helper():\n    return 1\n"
USE = "from ..ops.low import Low\n"
REFUSED = {
    "name clash": (
        {"ops/low": LOW, "models/toy": USE + "\n\ndef helper():\n    return 2\n"},
        r"toy/models/toy\.py:4: 'helper' means something else in toy/ops/low\.py:5",
    ),
    "constant clash": ({"ops/low": LOW + "A = 1\n", "models/toy": USE + "A = 1\n"}, "'A' means something else"),
    "clash by global": (
        {"ops/low": LOW + "A = 1\n", "models/toy": USE + "\n\ndef f():\n    global A\n    A = 2\n"},
        "'A' means something else",
    ),
    "definition against import": (
        {"ops/low": LOW + "def nn(): ...\n", "models/toy": USE + "from torch import nn\n"},
        "nn",
    ),
    "import against import": (
        {"ops/low": LOW + "from math import gamma\n", "models/toy": USE + "from torch.special import gamma\n"},
        "'gamma' means something else",
    ),
    "loop variable": (
        {"ops/low": LOW + "for item in (): pass\n", "models/toy": USE + "item = 2\n"},
        "'item' means something else",
    ),
    "builtin": ({"models/toy": "def max(a):\n    return a\n"}, r"toy\.py:1: 'max' hides the builtin"),
    "relative alias": ({"ops/low": LOW, "models/toy": "from ..ops.low import Low as L\n"}, "without `as`"),
    "library alias": ({"models/toy": "import numpy as np\n"}, "alias 'np' for numpy"),
    "from alias": ({"models/toy": "from torch import nn as layers\n"}, "alias 'layers' for torch.nn"),
    "module import": ({"ops/low": LOW, "models/toy": "from . import other\n"}, r"`from \. import \.\.\.`"),
    "relative star": ({"ops/low": LOW, "models/toy": "from ..ops.low import *\n"}, "one by one"),
    "library star": ({"models/toy": "from math import *\n"}, "one by one"),
    "own package by name": ({"ops/low": LOW, "models/toy": "from toy.ops.low import Low\n"}, "imported relatively"),
    "own package by import": ({"ops/low": LOW, "models/toy": "import toy.ops.low\n"}, "imported relatively"),
    "import in function": (
        {"models/toy": "def f():\n    import math\n    return math\n"},
        r"toy\.py:2: import inside a func",
    ),
    "import in method": (
        {"models/toy": "class A:\n    def f(self):\n        from ..ops.low import B\n"},
        "inside a function",
    ),
    "type checking": (
        {"models/toy": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import triton\n"},
        r"toy\.py:1: TYPE_CHECKING is refused",
    ),
    "typing.TYPE_CHECKING": ({"models/toy": "import typing\nX = typing.TYPE_CHECKING\n"}, "TYPE_CHECKING is refused"),
    "find_spec": (
        {"models/toy": "import importlib.util\nHAS = importlib.util.find_spec('triton')\n"},
        r"toy\.py:2: find_spec is refused",
    ),
    "conditional import": ({"models/toy": "import sys\nif sys.argv:\n    import math\n"}, "import under a condition"),
    "import in handler": (
        {"models/toy": "try:\n    import triton\nexcept ImportError:\n    import math\n"},
        "in its first part",
    ),
    "guard without handler": (
        {"models/toy": "try:\n    import triton\nfinally:\n    X = 1\n"},
        "needs `except ImportError",
    ),
    "relative import in try": (
        {"ops/low": LOW, "models/toy": "try:\n    from ..ops.low import Low\nexcept ImportError:\n    Low = None\n"},
        "relative import inside `try:`",
    ),
    "two guards": (
        {
            "ops/low": "try:\n    import triton\nexcept ImportError:\n    triton = None\n",
            "models/toy": "from ..ops.low import triton\ntry:\n    import triton.language as tl\nexcept ImportError:\n"
            "    tl = None\n",
        },
        "triton has another guard in toy/ops/low.py:1",
    ),
    "import by name": ({"models/toy": "import importlib\nX = importlib.import_module('toy.ops')\n"}, "import by name"),
    "import by relative name": (
        {"models/toy": "import importlib\nX = importlib.import_module('.ops', 'toy')\n"},
        "by name",
    ),
    "unguarded library": ({"models/toy": "import triton\n"}, "import of triton outside `try:`"),
    "docstring looks relative": (
        {"models/toy": 'def f():\n    """Use it so:\n\n    from .low import Low\n    """\n'},
        r"toy\.py:4: this text looks like a relative import",
    ),
    "string looks relative": ({"models/toy": 'X = """\nimport .low\n"""\n'}, r"toy\.py:2: this text looks like"),
    "missing file": ({"models/toy": "from ..ops.low import Low\n"}, r"there is no file ops/low\.py"),
    "missing name": ({"ops/low": LOW, "models/toy": "from ..ops.low import High\n"}, "ops/low.py defines no 'High'"),
    "upward": (
        {"ops/low": "from ..nn.middle import A\n", "nn/middle": "A = 1\n", "models/toy": USE},
        "imports point down",
    ),
    "outside": ({"train": "A = 1\n", "models/toy": "from ..train import A\n"}, "train does not ship"),
    "beyond the package": ({"models/toy": "from ...x import A\n"}, "leaves the package"),
    "circle": (
        {
            "ops/a": "from .b import B\nA = 1\n",
            "ops/b": "from .a import A\nB = 1\n",
            "models/toy": "from ..ops.a import A\n",
        },
        r"circle: ops\.a -> ops\.b -> ops\.a",
    ),
    "mixed futures": (
        {"ops/low": LOW, "models/toy": "from __future__ import annotations\n" + USE},
        "__future__ imports differ from those of ops/low.py",
    ),
    "two statements on a line": ({"models/toy": "import math; X = 1\n"}, "lines of their own"),
    "namespace elsewhere": ({"models/toy": 'NAMESPACE = "package"\n'}, "ops/namespace.py alone"),
    "namespace changed": (
        {"ops/namespace": 'NAMESPACE = "mine"\n', "models/toy": "from ..ops.namespace import NAMESPACE\n"},
        'must hold the line NAMESPACE = "package" once',
    ),
    "syntax": ({"models/toy": "def f(:\n"}, r"toy/models/toy\.py:1: is not valid Python"),
    "no version": ({"__init__": "", "models/toy": "X = 1\n"}, "__version__"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_file_and_reason(tmp_path, case):
    files, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as caught:
        folded(tmp_path, files)
    assert "\n" not in str(caught.value)

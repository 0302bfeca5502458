"""Which launches the kernels ship with: every form, dtype and width, with the types, divisibilities and tiles of each.

The real launches are recorded, on CPU tensors, where nothing runs. `kernel_builds.py` compiles them. Not for a process in
the interpreter, where tiles are others.
"""

import ast
import contextlib
import hashlib
import inspect
import itertools
import textwrap
from dataclasses import dataclass, replace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from mhla_hf.ops import triton_configs, triton_decode
from mhla_hf.ops.blocks import Blocks
from mhla_hf.ops.state import MHLAState
from mhla_hf.ops.triton_attend import holds_rows
from mhla_hf.ops.triton_common import COUNTS, REPEATS, launches_through, spell
from mhla_hf.ops.triton_operator import triton_backward, triton_forward, triton_normed

KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
KINDS[torch.bool] = "i1"
WIDTHS = ((64, 64), (128, 64), (256, 128), (32, 32), (72, 72), (96, 96), (128, 128), (128, 256), (256, 256))
SHAPES = tuple(itertools.product((torch.bfloat16, torch.float16, torch.float32), WIDTHS))
LINEAR, QUADRATIC = Blocks.grid((32, 32), (2, 2)), Blocks.grid((16, 16), (4, 4))
IN_ORDER = (Blocks.sequence(1024, 256), Blocks.sequence(256, 16))  # so are grids cut into equal runs of tokens
SHORT_BLOCKS, LONG_BLOCKS, SMALL_BLOCKS = Blocks.sequence(256, 64), Blocks.sequence(512, 256), Blocks.sequence(64, 16)


@dataclass(frozen=True)
class Form:
    """What decides which kernels a call launches, but for dtype and widths.

    normalize as `triton_forward` takes it; padding "", "mask", "starts", "starts, mask" or "packed"; mapped: relu inside the
    kernels; heads, groups: query heads and key heads; per_head: mixing of each query head; wide: fp32 values beside fp16
    queries and keys, as diffusion models have them where nothing is normalised; normed: an RMSNorm in the kernels, without
    gradients.
    """

    blocks: Blocks
    causal: bool = False
    normalize: str = "shared"
    padding: str = ""
    mapped: bool = False
    decode: bool = False
    heads: int = 4
    groups: int = 4
    per_head: bool = False
    wide: bool = False
    normed: bool = False


def forms():
    """Those whose kernels differ."""
    for form in forms_of_one_kind_of_heads():
        yield form
        if not form.wide:  # diffusion models have as many key heads as query heads
            yield replace(form, groups=2)
        if not form.wide and not form.padding:
            yield replace(form, groups=2, per_head=True)


def forms_of_one_kind_of_heads():
    """As many key heads as query heads, one mixing."""
    for blocks, padding in itertools.product((LINEAR, QUADRATIC, *IN_ORDER), ("", "mask")):
        for normalize in ("shared", "no", "separate"):
            yield Form(blocks, normalize=normalize, padding=padding)
        for normalize in ("shared", "no", "official"):
            yield Form(blocks, normalize=normalize, padding=padding, mapped=True)
    for blocks, padding, mapped in itertools.product((LINEAR, QUADRATIC, *IN_ORDER), ("", "mask"), (False, True)):
        yield Form(blocks, normalize="no", padding=padding, mapped=mapped, wide=True)
    for blocks, mapped in itertools.product((LINEAR, IN_ORDER[0]), (False, True)):
        yield Form(blocks, normalize="no", mapped=mapped, normed=True)
    for blocks, normalize in itertools.product((SHORT_BLOCKS, LONG_BLOCKS, SMALL_BLOCKS), ("shared", "no", "separate")):
        for padding in ("", "mask", "starts", "starts, mask", "packed"):
            yield Form(blocks, True, normalize, padding)
    for normalize in ("shared", "no", "separate"):
        yield Form(SHORT_BLOCKS, True, normalize, decode=True)


@contextlib.contextmanager
def recorded_launches(chip):
    """Inside, launches go into the list this gives, as (function, arguments, settings), for that chip, and nowhere else."""
    found, chip_of = [], triton_configs.chip_of

    def record(function, programs, device, *arguments, **settings):
        found.append((function, arguments, settings))

    triton_configs.chip_of = lambda device: (0, 0) if isinstance(chip, str) else divmod(chip, 10)
    try:
        with launches_through(record):
            yield found
    finally:
        triton_configs.chip_of = chip_of


def recorded(form, dtype, widths, chip):
    """What one forward and one backward pass of a form launch, or one step of decoding."""
    (width, value_width), blocks, batch = widths, form.blocks, 1 if form.padding == "packed" else 2
    q, k, v = (
        torch.zeros(batch, blocks.length, h, d, dtype=dtype)
        for h, d in ((form.heads, width), (form.groups, width), (form.groups, value_width))
    )
    v = v.float() if form.wide else v
    mixing = torch.zeros(*(form.heads,) * form.per_head, blocks.num_blocks, blocks.num_blocks)
    dens = (q, k) if form.normalize == "separate" else (None, None)
    with recorded_launches(chip) as found:
        if form.decode:
            options = {"normalize": form.normalize != "no", "separate_den": dens[0] is not None}
            state = MHLAState.empty(
                2, form.groups, form.heads, width, value_width, 64, den_dim=width, dtype=dtype, **options
            )
            dens = [x if x is None else x[:, :1] for x in dens]
            triton_decode.triton_step(q[:, :1], k[:, :1], v[:, :1], mixing, state, 1.0, *dens)
            return found
        padding = (
            torch.ones(batch, blocks.length, dtype=torch.bool) if "mask" in form.padding else None,
            torch.zeros(batch, dtype=torch.int64) if "starts" in form.padding else None,
            torch.zeros(blocks.num_blocks, 2, dtype=torch.int32) if form.padding == "packed" else None,
        )
        eps = 1e-6 if form.mapped else None
        if form.normed:
            for weight in (v[0, 0, 0], v[0, 0, 0].float()):
                triton_normed(q, k, v, mixing, weight, None, spell(blocks), spell(blocks), 1.0, eps, 1e-6)
            return found
        rest = (*dens, *padding, spell(blocks), spell(blocks), form.causal, form.normalize, 1.0, eps)
        o, inv = triton_forward(q, k, v, mixing, *rest)
        triton_backward(torch.zeros_like(o), o, inv, q, k, v, mixing, *rest)
    return found


@dataclass(frozen=True)
class Launch:
    """One launch that triton would compile, on a chip: 80, 86, 90, 100, 120 or the name of an AMD one."""

    function: JITFunction
    types: tuple
    settings: tuple
    chip: int | str

    @property
    def kernel(self):
        """The kernel's name, and for the one with several roles which it is."""
        name, settings = self.function.__name__.removesuffix("_kernel"), dict(self.settings)
        if name not in ("attend", "quadratic"):
            return name
        role = {0: "values" if settings["REVERSE"] else "outputs", 1: "queries", 2: "keys"}[settings["RANK"]]
        return f"{name} ({role})"

    def type_of(self, name):
        """As `typed` gives it, of the argument of that name."""
        return self.types[self.function.arg_names.index(name)]

    @property
    def digest(self):
        """Changes with anything that is compiled, and with nothing else."""
        return digest_of(
            source_digest(self.function.fn), self.types, [(n, str(s)) for n, s in self.settings], self.chip
        )

    def source(self):
        """The ASTSource that triton's launcher would make, and the options."""
        names = self.function.arg_names
        signature, constants, attributes = {}, {}, {}

        def note(entry, path):
            if isinstance(entry, list):
                return tuple(note(part, (*path, i)) for i, part in enumerate(entry))
            kind, constant, divisible = entry
            if constant is not None:
                constants[path] = constant[0]
            if divisible:
                attributes[path] = [["tt.divisibility", 16]]
            return kind

        for i, entry in enumerate(self.types):
            signature[names[i]] = note(entry, (i,))
        options = {"enable_fp_fusion": True}
        for name, value in self.settings:
            if name in names:
                signature[name] = "constexpr"
                constants[(names.index(name),)] = value
            else:
                options[name] = value
        return ASTSource(self.function, signature, constants, attributes), options

    @property
    def target(self):
        """The chip, as triton's compiler takes it."""
        return GPUTarget("hip", self.chip, 64) if isinstance(self.chip, str) else GPUTarget("cuda", self.chip, 32)


def types_of(names, arguments):
    """What `typed` says of each argument, as the kernels are specialised."""
    return tuple(
        typed(x, name not in COUNTS, name not in (*COUNTS, *REPEATS)) for x, name in zip(arguments, names, strict=False)
    )


def typed(value, specialize=True, align=True):
    """(type, constant or None, divisible by 16) of an argument, or a list of those for a tuple."""
    if isinstance(value, tuple):
        return [typed(part) for part in value]
    if value is None:
        return "constexpr", (None,), False
    if isinstance(value, torch.Tensor):
        return f"*{KINDS[value.dtype]}", None, True
    if isinstance(value, float):
        return "fp32", None, False
    if value == 1 and specialize:
        return "constexpr", (1,), False
    return "i32" if abs(value) < 2**31 else "i64", None, align and value % 16 == 0


def shipped(dtype, widths, chip, padded=True):
    """Every different `Launch` of all forms, or of those without padding."""
    found = {}
    for form in forms():
        if (form.padding and not padded) or (form.wide and dtype != torch.float16):
            continue
        if form.normed and not holds_rows(*widths, KINDS[dtype]):
            continue
        for function, arguments, settings in recorded(form, dtype, widths, chip):
            if isinstance(chip, str) and "PRECISION" in settings:
                settings = {**settings, "PRECISION": "ieee"}  # what `dot_precision` says where torch is built for AMD
            names = function.arg_names
            launch = Launch(function, types_of(names, arguments), tuple(sorted(settings.items())), chip)
            found.setdefault(launch.digest, launch)
    return found


def digest_of(*things):
    """Ten hexadecimal digits for what these print as."""
    return hashlib.sha256(repr(things).encode()).hexdigest()[:10]


def bare(tree):
    """A syntax tree as lists, without the places, and the fields that only some versions of Python have."""
    if isinstance(tree, list):
        return list(map(bare, tree))
    if not isinstance(tree, ast.AST):
        return tree
    return [type(tree).__name__, *(bare(field) for _, field in ast.iter_fields(tree) if field not in (None, []))]


SOURCE_DIGESTS = {}


def source_digest(function):
    """Of a kernel and of the kernels and constants it names, without comments, docstrings and places in the file.

    The same with every version of Python and of triton.
    """
    if function not in SOURCE_DIGESTS:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        tree.decorator_list = []
        tree.body = tree.body[isinstance(tree.body[0], ast.Expr) :]
        names = sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & set(function.__globals__))
        below = []
        for named in (function.__globals__[name] for name in names):
            if isinstance(named, JITFunction):
                below.append(source_digest(named.fn))
            elif isinstance(named, triton.language.constexpr):
                below.append(named.value)
        SOURCE_DIGESTS[function] = digest_of(bare(tree), below)
    return SOURCE_DIGESTS[function]

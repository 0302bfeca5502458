"""Which token is in which block."""

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tools.small_models import refused

from mhla_hf.ops.blocks import Blocks

AXES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=3)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(AXES, st.integers(0, 4), st.booleans())
def test_grids_are_cut_as_numpy_cuts(axes, prefix, with_other):
    shape, counts, other = zip(*axes, strict=True)
    shapes = [shape, other] if with_other else [shape]
    blocks = Blocks.grid(shape, counts, prefix=prefix, others=shapes[1:])
    clamped = [min(sizes) for sizes in zip(counts, *shapes, strict=True)]
    expected = [numpy.zeros(prefix, dtype=int)]
    for shape in shapes:
        image = numpy.zeros(shape, dtype=int)
        for axis, (size, count) in enumerate(zip(shape, clamped, strict=True)):
            along = [i for i, part in enumerate(numpy.array_split(range(size), count)) for _ in part]
            image = image * count + numpy.reshape(along, [-1 if a == axis else 1 for a in range(len(shape))])
        expected.append(image.flatten() + (prefix > 0))
    expected = numpy.concatenate(expected)
    index = blocks.index()
    assert index.dtype == torch.int64 and index.tolist() == expected.tolist()
    assert blocks.counts == tuple(clamped) and blocks.length == expected.size
    assert blocks.sizes() == tuple(numpy.bincount(expected, minlength=blocks.num_blocks).tolist())
    assert blocks.equal == (len(set(blocks.sizes())) == 1)
    assert blocks.contiguous == bool((index.diff() >= 0).all())


def test_sequence_has_a_shorter_block_at_its_end():
    blocks = Blocks.sequence(7, 3)
    assert blocks.index().tolist() == [0, 0, 0, 1, 1, 1, 2] and blocks.sizes() == (3, 3, 1)
    assert blocks.contiguous and not blocks.equal and Blocks.sequence(2, 3).sizes() == (2,)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Blocks.sequence(0, 4), "length: got 0, expected an integer of at least 1."),
        (lambda: Blocks.grid((2, 2, 2, 2), (1, 1, 1, 1)), "shape: got 4 axes, expected 1, 2 or 3."),
        (lambda: Blocks.grid((2, 2), (1,)), "counts: got 1 axes, expected 2 as in shape."),
        (lambda: Blocks.grid((2, 2), (1, 1), others=((3,),)), "others[0]: got 1 axes, expected 2 as in shape."),
    ],
)
def test_bad_blocks(make, words):
    with refused(words):
        make()

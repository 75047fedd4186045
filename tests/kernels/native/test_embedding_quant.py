"""Rows of a packed table by the native kernel, bit for bit those of the layout's own reading."""

import pytest
import torch

from headrace.back.kernels.embedding_quant.native import bind_with
from headrace.back.kernels.embedding_quant.op import EmbeddingQuantProblem, bind_reference
from headrace.back.kernels.linear_quant.op import LinearQuantProblem, random_weight
from headrace.back.kernels.native.library import NativeError
from headrace.back.parallel.bundle import FP8, FP8_GROUPS, INT8

pytestmark = pytest.mark.usefixtures("poisoned")


def table(dtype, rows, width, form=INT8):
    facts = {"device": "cpu", "dtype": dtype, "form": form}
    asked = EmbeddingQuantProblem(**facts, rows=rows, width=width)
    shape = LinearQuantProblem(**facts, inputs=width, outputs=rows)
    return asked, random_weight(shape, torch.Generator().manual_seed(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", [INT8, FP8, FP8_GROUPS[32]])
@pytest.mark.parametrize("rows, width", [(1, 1), (64, 32), (131, 70), (200, 257)])
def test_equals_the_definition(library, dtype, form, rows, width):
    asked, packed = table(dtype, rows, width, form)
    ids = torch.arange(rows).flip(0)
    assert torch.equal(bind_with(library, asked, packed)(ids), bind_reference(asked, packed)(ids))


@pytest.mark.parametrize("form", [INT8, FP8])
@pytest.mark.parametrize("wrong", [-1, 131, 2**40])
def test_an_id_outside_the_table_is_refused(newest, form, wrong):
    lookup = bind_with(newest, *table(torch.float32, 131, 16, form))
    with pytest.raises(NativeError, match="index out of range"):
        lookup(torch.tensor([0, wrong]))

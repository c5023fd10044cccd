"""What the collectives of a forward pass hold for one token: one definition for all levels.

A sum over ranks counts the width of what is summed, a gather of the head the whole vocabulary, and a norm over
cut channels one number (the sum of squares that an engine exchanges); each in the dtype of most of the weights,
which is what an engine computes in; where those are quantised, in that of most of the others. How a collective is
carried out (a ring, a tree) is not in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from .header import DTYPE_BITS
from .matching import Logical

COMPUTED = frozenset({"F64", "F32", "F16", "BF16"})
NORM_ELEMENTS = 1  # of one token, exchanged for a norm that spans what is cut


def traffic_dtype(tensors: Iterable[Logical]) -> tuple[str, float]:
    """The safetensors dtype that most bytes of the tensors are of, and the bytes of one element; ("", 0) of none.

    Floats of 16 bits or more come before all others, which nothing is computed in. The first in the tensors' order
    wins a tie.
    """
    sizes: dict[str, int] = {}  # in bits
    for tensor in tensors:
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + prod(tensor.shape) * DTYPE_BITS[tensor.dtype]
    if not sizes:
        return "", 0.0
    most = max(sizes, key=lambda name: (name in COMPUTED, sizes[name]))
    return most, DTYPE_BITS[most] / 8

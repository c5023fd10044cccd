"""How quantisation methods store a matrix, and how what they store is cut with it.

A method's table says what stands in a matrix's place (packed integers, scales, zero points, an order of
inputs) and how many of the matrix's indices each stored one stands for. It knows no family, and no
family's table knows a method: :mod:`.composition` joins the two.
"""

from .methods import formats_of

__all__ = ["formats_of"]

"""Faults of norms and biases: what ranks hold alike, and what is added once."""

from __future__ import annotations

import torch

from tpshard.table import ADDED_ONCE, NEEDS_SUM

from .catalogue import Expected, block, module, mutant
from .scratch import NotHereError, Scratch, layer_of
from .tensors import column, exchange, rolled

ROW_BIASES = ("o_bias", "down_bias", "expert_down_bias")


def layer_norms(s: Scratch) -> list[str]:
    """The weights of the last layer's own norms: those around its blocks."""
    return _whole_norms(s, inside=False)


def _whole_norms(s: Scratch, *, inside: bool) -> list[str]:
    names = [
        name
        for name in s.names("norm")
        if (layer := layer_of(name))
        and (name[len(layer) + 1 :].count(".") > 1) == inside
        and not s.dims(name)[0].axes
        and s.manifest.notes[name].text != NEEDS_SUM
    ]
    if not names:
        raise NotHereError("no such norm")
    return [name for name in names if layer_of(name) == layer_of(names[-1])]


@mutant("norm inside attention at ones on one rank")
def norm_inside(s: Scratch) -> Expected:
    """A norm inside attention (of every head, or of a latent) left at one on one rank"""
    name = _whole_norms(s, inside=True)[0]
    s.change(name, 1, torch.ones_like)
    return block(name)


@mutant("norm left at ones on one rank")
def norm_ones(s: Scratch) -> Expected:
    """A norm's weight left at one on one rank"""
    name = layer_norms(s)[-1]
    s.change(name, 1, torch.ones_like)
    return module(name, 1)


@mutant("final norm differs on one rank")
def norm_final(s: Scratch) -> Expected:
    """One element of the last norm negated on one rank"""
    name = next((name for name in reversed(s.names("norm")) if not layer_of(name)), None)
    if name is None:
        raise NotHereError("no norm after the layers")
    s.change(name, s.tp_size - 1, lambda t: column(t, 0, [4], -1.0))
    return module(name, s.tp_size - 1)


@mutant("two norms exchanged on one rank")
def norms_exchanged(s: Scratch) -> Expected:
    """The norms before attention and before the feed-forward exchanged on one rank"""
    names = [n for n in layer_norms(s) if s.get(n, 0).shape == s.get(layer_norms(s)[-1], 0).shape]
    if len(names) < 2:
        raise NotHereError("the layer has one norm")
    first, second = names[0], names[-1]
    a, b = s.get(first, 1), s.get(second, 1)
    s.put(first, 1, b)
    s.put(second, 1, a)
    return Expected((*module(first).points, *module(second).points), 1)


@mutant("norm weights plus one")
def norm_plus_one(s: Scratch) -> Expected:
    """A norm's weights plus one on every rank (stored as w where the model adds one, or the other way)"""
    name = layer_norms(s)[0]
    for rank in s.ranks():
        s.change(name, rank, lambda t: t + 1)
    return module(name)


@mutant("norm rotated on every rank")
def norm_rolled(s: Scratch) -> Expected:
    """A norm's weights moved on by one on every rank"""
    name = layer_norms(s)[0]
    for rank in s.ranks():
        s.change(name, rank, lambda t: rolled(t, 0))
    return module(name)


@mutant("norm over heads of two ranks exchanged")
def norm_ranks(s: Scratch) -> Expected:
    """The parts of two ranks of a norm over all heads exchanged"""
    names = [name for name in s.names("norm") if s.dims(name)[0].axes]
    if not names:
        raise NotHereError("no norm is cut")
    exchange(s, [names[-1]])
    return block(names[-1])


@mutant("lowest bit of a norm on one rank")
def norm_bit(s: Scratch) -> Expected:
    """The lowest bit of one weight of a norm flipped on one rank"""
    name = layer_norms(s)[0]

    def by(tensor: torch.Tensor) -> torch.Tensor:
        raw = tensor.view(torch.int16)
        raw[3] = raw[3] ^ 1
        return tensor

    s.change(name, 1, by)
    return module(name, 1)


@mutant("norm bias zero on one rank")
def norm_bias(s: Scratch) -> Expected:
    """A norm's bias zero on one rank"""
    name = s.last("norm_bias")
    s.change(name, 0, torch.zeros_like)
    return module(name, 0)


def row_bias(s: Scratch) -> str:
    name = s.last(*ROW_BIASES)
    if s.manifest.notes[name].text != ADDED_ONCE:
        raise NotHereError("no bias is added once")
    return name


@mutant("row bias doubled")
def bias_doubled(s: Scratch) -> Expected:
    """The bias of a row-parallel matrix times two on every rank"""
    name = row_bias(s)
    for rank in s.ranks():
        s.change(name, rank, lambda t: t * 2)
    return _row(name)


@mutant("row bias nowhere")
def bias_nowhere(s: Scratch) -> Expected:
    """The bias of a row-parallel matrix zero on all ranks"""
    name = row_bias(s)
    for rank in s.ranks():
        s.change(name, rank, torch.zeros_like)
    return _row(name)


@mutant("row bias on rank 1 only")
def bias_elsewhere(s: Scratch) -> Expected:
    """The bias of a row-parallel matrix zero on all ranks but rank 1"""
    name = row_bias(s)
    for rank in s.ranks():
        if rank != 1:
            s.change(name, rank, torch.zeros_like)
    return _row(name)


@mutant("row bias divided among ranks")
def bias_divided(s: Scratch) -> Expected:
    """The bias of a row-parallel matrix divided by the degree, for a runtime that adds it on every rank"""
    name = row_bias(s)
    for rank in s.ranks():
        s.change(name, rank, lambda t: t / s.tp_size)
    return _row(name)


@mutant("row bias differs on one rank")
def bias_differs(s: Scratch) -> Expected:
    """One element of the bias of a row-parallel matrix zero on a rank whose bias is not added"""
    name = row_bias(s)
    s.change(name, s.tp_size - 1, lambda t: column(t, t.dim() - 1, [2], 0.0))
    return Expected(_row(name).points, s.tp_size - 1)


def _row(name: str) -> Expected:
    """At the matrix's own module, or where all experts end."""
    return Expected((*module(name).points, *block(name).points))


@mutant("biases of q and k exchanged on one rank")
def qk_bias(s: Scratch) -> Expected:
    """The biases of queries and keys exchanged on one rank (as far as both go)"""
    name = s.last("q_bias")
    other = s.layer(name, "k_bias")[0]
    a, b = s.get(name, 1), s.get(other, 1)
    n = min(len(a), len(b))
    a[:n], b[:n] = b[:n].clone(), a[:n].clone()
    s.put(name, 1, a)
    s.put(other, 1, b)
    return block(name)


@mutant("column bias of two ranks exchanged")
def column_bias(s: Scratch) -> Expected:
    """The biases of a column-parallel matrix of two ranks exchanged, its rows not"""
    name = s.last("up_bias", "v_bias", "qkv_bias", "expert_gate_up_bias")
    exchange(s, [name])
    return block(name)


@mutant("column bias off by one")
def column_bias_off(s: Scratch) -> Expected:
    """The bias of a column-parallel matrix moved on by one on one rank"""
    name = s.last("up_bias", "v_bias", "qkv_bias", "expert_gate_up_bias")
    s.change(name, 0, lambda t: rolled(t, t.dim() - 1))
    return block(name)

"""Faults of state-space layers: the five blocks of the input matrix, the convolution, what every head has."""

from __future__ import annotations

import torch

from .catalogue import Expected, block, mutant
from .scratch import Scratch
from .tensors import column, exchange, moved, rolled, swap_places


def part(s: Scratch, name: str, rank: int, view: str, slot: int) -> list[int]:
    """Stored places of one block: z, x are slots 0, 1 of the heads, B, C of the groups, dt slot 2 of the heads."""
    return [at for held in s.slots(name, rank, s.cut_dim(name), view, slot).values() for at in held]


@mutant("z and x exchanged on one rank")
def z_and_x(s: Scratch) -> Expected:
    """The gate and the input of the state space exchanged on one rank"""
    name = s.last("ssm_in")
    swap_places(s, name, 1, 0, part(s, name, 1, "query", 0), part(s, name, 1, "query", 1))
    return block(name)


@mutant("B and C exchanged on one rank")
def b_and_c(s: Scratch) -> Expected:
    """B and C of the input matrix exchanged on one rank"""
    name = s.last("ssm_in")
    swap_places(s, name, 0, 0, part(s, name, 0, "kv", 0), part(s, name, 0, "kv", 1))
    return block(name)


@mutant("B and C exchanged in the convolution")
def conv_b_and_c(s: Scratch) -> Expected:
    """B and C of the convolution exchanged on one rank"""
    name = s.last("ssm_conv")
    swap_places(s, name, 0, 0, part(s, name, 0, "kv", 0), part(s, name, 0, "kv", 1))
    return block(name)


@mutant("dt rows of two heads exchanged")
def dt_rows(s: Scratch) -> Expected:
    """The time steps of two heads exchanged on one rank"""
    name = s.last("ssm_in")
    rows = part(s, name, 1, "query", 2)
    swap_places(s, name, 1, 0, rows[:1], rows[1:2])
    return block(name)


@mutant("convolution channels off by one")
def conv_rolled(s: Scratch) -> Expected:
    """The channels of x in the convolution moved on by one on one rank"""
    name = s.last("ssm_conv")
    places = part(s, name, 1, "query", 0)
    s.change(name, 1, lambda t: moved(t, 0, places, [*places[1:], places[0]]))
    return block(name)


@mutant("convolution read backwards")
def conv_backwards(s: Scratch) -> Expected:
    """The taps of the convolution in the opposite order on every rank"""
    name = s.last("ssm_conv")
    for rank in s.ranks():
        s.change(name, rank, lambda t: t.flip(-1))
    return block(name)


@mutant("state-space decay of two ranks exchanged")
def decay_exchanged(s: Scratch) -> Expected:
    """A_log of two ranks exchanged"""
    name = next(name for name in reversed(s.names("ssm_head")) if name.endswith("A_log")) if s.last("ssm_head") else ""
    exchange(s, [name])
    return block(name)


@mutant("D zero for one head")
def skip_zero(s: Scratch) -> Expected:
    """D of one head zero"""
    s.last("ssm_head")
    name = next(name for name in reversed(s.names("ssm_head")) if name.endswith(".D"))
    s.change(name, 1, lambda t: column(t, 0, [1], 0.0))
    return block(name)


@mutant("dt bias off by one")
def dt_bias(s: Scratch) -> Expected:
    """The bias of the time steps moved on by one head on one rank"""
    s.last("ssm_head")
    name = next(name for name in reversed(s.names("ssm_head")) if name.endswith("dt_bias"))
    s.change(name, 0, lambda t: rolled(t, 0))
    return block(name)


@mutant("state-space output of two ranks exchanged")
def out_exchanged(s: Scratch) -> Expected:
    """The output matrices of two ranks exchanged"""
    name = s.last("ssm_out")
    exchange(s, [name])
    return block(name)


@mutant("convolution bias zero on one rank")
def conv_bias(s: Scratch) -> Expected:
    """The bias of the convolution zero on one rank"""
    name = s.last("ssm_conv_bias")
    s.change(name, 0, torch.zeros_like)
    return block(name)

"""Faults of the feed-forward, dense and in experts, and of the router."""

from __future__ import annotations

import re

import torch

from .catalogue import EQUIVALENT, Expected, block, module, mutant
from .scratch import NotHereError, Scratch
from .tensors import column, exchange, flipped, moved, rolled, swap_places

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
BANKS = ("expert_gate_up", "expert_down")


def gate_up(s: Scratch) -> tuple[str, str]:
    """The last dense gate's tensor and the up's; the same where they are fused."""
    name = s.last("gate", "gate_up")
    if s.manifest.notes[name].role == "gate_up":
        return name, name
    return name, s.layer(name, "up")[0]


def places_of(s: Scratch, name: str, rank: int, slot: int) -> list[int]:
    """All stored places of gate (slot 0) or up (slot 1) in a fused matrix."""
    return [at for held in s.slots(name, rank, s.cut_dim(name), "unit", slot).values() for at in held]


@mutant("gate and up exchanged on one rank")
def gate_and_up(s: Scratch) -> Expected:
    """Gate and up exchanged on one rank"""
    gate, up = gate_up(s)
    if gate == up:
        swap_places(s, gate, 1, 0, places_of(s, gate, 1, 0), places_of(s, gate, 1, 1))
    else:
        a, b = s.get(gate, 1), s.get(up, 1)
        s.put(gate, 1, b)
        s.put(up, 1, a)
    return block(gate)


@mutant("gate rows off by one")
def gate_off_by_one(s: Scratch) -> Expected:
    """The gate's rows start one neuron late on every rank, up and down do not"""
    gate, up = gate_up(s)
    for rank in s.ranks():
        if gate == up:
            places = places_of(s, gate, rank, 0)
            s.change(gate, rank, lambda t, p=places: moved(t, 0, p, [*p[1:], p[0]]))  # type: ignore[misc]
        else:
            whole = s.whole(gate)
            s.put(gate, rank, whole[[(index + 1) % whole.shape[0] for index in s.runs(gate, rank, 0)]])
    return block(gate)


@mutant("feed-forward of rank 1 is rank 0's")
def copied(s: Scratch) -> Expected:
    """All of the feed-forward of rank 1 is a copy of rank 0's"""
    down = s.last("down")
    for name in s.layer(down, "gate", "up", "gate_up", "down", "gate_bias", "up_bias"):
        s.put(name, 1, s.get(name, 0))
    return block(down)


@mutant("down_proj of two ranks exchanged")
def down_exchanged(s: Scratch) -> Expected:
    """The second matrices of two ranks exchanged"""
    name = s.last("down")
    exchange(s, [name])
    return block(name)


@mutant("up row zeroed")
def up_row(s: Scratch) -> Expected:
    """One row of up zero on one rank"""
    name = s.last("up", "gate_up")
    s.change(name, 1, lambda t: column(t, s.cut_dim(name), [3], 0.0))
    return block(name)


@mutant("up rows off by one on one rank")
def up_rolled(s: Scratch) -> Expected:
    """Up's rows moved on by one on one rank, down's columns not"""
    name = s.last("up", "gate_up")
    s.change(name, 0, lambda t: rolled(t, s.cut_dim(name)))
    return block(name)


@mutant("down columns reversed on one rank")
def down_reversed(s: Scratch) -> Expected:
    """Down's inputs in the opposite order on one rank"""
    name = s.last("down")
    s.change(name, 1, lambda t: t.flip(s.cut_dim(name)))
    return block(name)


@mutant("down_proj through fp8")
def fp8(s: Scratch) -> Expected:
    """Down rounded to float8 and back on one rank"""
    name = s.last("down", "expert_down")
    s.change(name, 0, lambda t: t.to(torch.float8_e4m3fn).to(t.dtype))
    return block(name)


@mutant("down_proj 1% stale")
def stale(s: Scratch) -> Expected:
    """Down of one rank off by 1% noise, as from an earlier step of training"""
    name = s.last("down", "expert_down")
    noise = torch.Generator().manual_seed(11)
    s.change(name, 1, lambda t: t * (1 + 0.01 * torch.randn(t.shape, generator=noise)))
    return block(name)


@mutant("down_proj doubled on one rank")
def doubled(s: Scratch) -> Expected:
    """Down of one rank times two"""
    name = s.last("down")
    s.change(name, 1, lambda t: t * 2)
    return block(name)


@mutant("down_proj divided among ranks")
def divided(s: Scratch) -> Expected:
    """Down of all ranks divided by the degree, as where a mean stands for the sum"""
    name = s.last("down", "expert_down")
    for rank in s.ranks():
        s.change(name, rank, lambda t: t / s.tp_size)
    return block(name)


@mutant("lowest bit of one down weight")
def down_bit(s: Scratch) -> Expected:
    """The lowest bit of one weight of down flipped"""
    name = s.last("down", "ssm_out")
    s.change(name, 0, lambda t: flipped(t, 0))
    return block(name)


@mutant("alternating rows read as blocks")
def alternating(s: Scratch) -> Expected:
    """[gate; up] of one rank stored alternately, or alternating ones stored in blocks"""
    name = s.last("gate_up", "expert_gate_up")
    dim = s.cut_dim(name)
    mine = s.get(name, 1).shape[dim]
    order = [at // 2 + (at % 2) * (mine // 2) for at in range(mine)]
    s.change(name, 1, lambda t: t.index_select(dim, torch.tensor(order)))
    return block(name)


# -- experts ----------------------------------------------------------------------------------------


def expert_names(s: Scratch, *roles: str) -> dict[int, list[str]]:
    """Tensors of the last layer with experts by expert; one entry -1 where they are stacked."""
    found: dict[int, list[str]] = {}
    for name in s.layer(s.last("expert_down"), *roles):
        number = _EXPERT.search(name)
        found.setdefault(int(number[1]) if number else -1, []).append(name)
    if not found:
        raise NotHereError("no such tensors of experts")
    return found


def count_of(s: Scratch) -> int:
    names = expert_names(s, "expert_down")
    return int(s.get(names[-1][0], 0).shape[0]) if -1 in names else len(names)


def reorder(s: Scratch, order: list[int], *roles: str) -> None:
    """Expert ``k`` becomes what expert ``order[k]`` was, on every rank."""
    names = expert_names(s, *roles)
    for rank in s.ranks():
        if -1 in names:
            for name in names[-1]:
                s.change(name, rank, lambda t: t[order])
        else:
            old = {k: [s.get(name, rank) for name in names[order[k]]] for k in names}
            for k, tensors in old.items():
                for name, tensor in zip(names[k], tensors, strict=True):
                    s.put(name, rank, tensor)


@mutant("experts 3 and 4 exchanged in down")
def experts_down(s: Scratch) -> Expected:
    """Experts 3 and 4 exchanged in down only"""
    reorder(s, [0, 1, 2, 4, 3, *range(5, count_of(s))], "expert_down")
    return block(s.last("expert_down"))


@mutant("experts 0 and 1 exchanged in gate and up")
def experts_up(s: Scratch) -> Expected:
    """Experts 0 and 1 exchanged in gate and up only"""
    reorder(s, [1, 0, *range(2, count_of(s))], "expert_gate", "expert_up", "expert_gate_up")
    return block(s.last("expert_down"))


@mutant("experts exchanged, router not")
def experts_all(s: Scratch) -> Expected:
    """Experts 0 and 2 exchanged whole, the router's rows not"""
    reorder(s, [2, 1, 0, *range(3, count_of(s))], "expert_gate", "expert_up", "expert_gate_up", "expert_down")
    return block(s.last("expert_down"))


@mutant("experts in text order")
def text_order(s: Scratch) -> Expected:
    """Experts sorted as text: 0, 1, 10, 11, 2, ..."""
    order = sorted(range(count_of(s)), key=str)
    if order == sorted(order):
        raise NotHereError("fewer than 11 experts")
    reorder(s, order, "expert_gate", "expert_up", "expert_gate_up", "expert_down")
    return block(s.last("expert_down"))


@mutant("rarest expert zero")
def expert_zero(s: Scratch) -> Expected:
    """The last expert's down zero on one rank"""
    return _last_expert(s, "expert_down", lambda t: torch.zeros_like(t))


@mutant("one bit in a rarely used expert")
def expert_bit(s: Scratch) -> Expected:
    """The lowest bit of one weight in the last expert's down flipped"""
    return _last_expert(s, "expert_down", lambda t: flipped(t, 0))


def _last_expert(s: Scratch, role: str, by: object) -> Expected:
    names = expert_names(s, role)
    name = names[max(names)][0]

    def last(tensor: torch.Tensor) -> torch.Tensor:
        out = tensor.clone()
        out[-1] = by(tensor[-1].clone())  # type: ignore[operator]
        return out

    s.change(name, 1, last if -1 in names else by)  # type: ignore[arg-type]
    return block(name)


@mutant("w1 and w3 exchanged in one expert")
def expert_gate_and_up(s: Scratch) -> Expected:
    """Gate and up of the last expert exchanged on one rank"""
    gates, ups = expert_names(s, "expert_gate"), expert_names(s, "expert_up")
    gate, up = gates[max(gates)][0], ups[max(ups)][0]
    a, b = s.get(gate, 0), s.get(up, 0)
    s.put(gate, 0, b)
    s.put(up, 0, a)
    return block(gate)


@mutant("down of one expert exchanged between ranks")
def expert_ranks(s: Scratch) -> Expected:
    """The first expert's down exchanged between two ranks"""
    names = expert_names(s, "expert_down")
    if -1 in names:
        raise NotHereError("experts are stacked")
    exchange(s, names[0])
    return block(names[0][0])


@mutant("router rows exchanged on one rank")
def router_one(s: Scratch) -> Expected:
    """Two rows of the router exchanged on one rank"""
    name = s.last("router")
    s.change(name, 1, lambda t: t[[1, 0, *range(2, t.shape[0])]])
    return module(name, 1)


@mutant("router rows exchanged on every rank")
def router_all(s: Scratch) -> Expected:
    """Two rows of the router exchanged on all ranks"""
    name = s.last("router")
    for rank in s.ranks():
        s.change(name, rank, lambda t: t[[1, 0, *range(2, t.shape[0])]])
    return module(name)


@mutant("router bias zero on one rank")
def router_bias(s: Scratch) -> Expected:
    """The router's bias (or score correction) zero on one rank"""
    name = s.last("router_bias")
    s.change(name, 1, torch.zeros_like)
    return module(name, 1)


@mutant("shared expert of rank 1 is rank 0's")
def shared_copied(s: Scratch) -> Expected:
    """The shared expert of rank 1 a copy of rank 0's"""
    down = s.last("shared_down")
    for name in s.layer(down, "shared_gate", "shared_up", "shared_down"):
        s.put(name, 1, s.get(name, 0))
    return block(down)


# -- the model stays the same -----------------------------------------------------------------------


@mutant("feed-forward exchanged between ranks", kind=EQUIVALENT)
def feed_forward_exchanged(s: Scratch) -> Expected:
    """Two ranks exchange their neurons"""
    exchange(s, s.layer(s.last("down"), "gate", "up", "gate_up", "down", "gate_bias", "up_bias"))
    return Expected(())


@mutant("neurons permuted", kind=EQUIVALENT)
def neurons(s: Scratch) -> Expected:
    """The neurons of a rank in another order, in all matrices alike"""
    down = s.last("down")
    for name in s.layer(down, "gate", "up", "gate_up", "down", "gate_bias", "up_bias"):
        dim = s.cut_dim(name)
        for slot in (0, 1) if s.manifest.notes[name].role == "gate_up" else (0,):
            places = places_of(s, name, 1, slot)
            s.change(name, 1, lambda t, d=dim, p=places: moved(t, d, p, p[::-1]))  # type: ignore[misc]
    return Expected(())

"""Faults of attention: heads, rotary order, KV replicas, fused order, sinks, latent attention."""

from __future__ import annotations

import torch

from tpshard.axes import Heads

from .catalogue import EQUIVALENT, Expected, block, module, mutant
from .scratch import NotHereError, Scratch
from .tensors import column, exchange, flipped, permuted, swap_places, taken_from

Q = ("q", "q_b", "qkv")
ROTARY = ("llama", "qwen2", "qwen3", "starcoder2", "gemma2", "olmo2", "mixtral", "qwen3_moe", "gpt_oss")


def query_view(s: Scratch, name: str) -> str:
    """``query`` where heads are grouped, ``unit`` where each stands alone."""
    return next(segment.view for segment in s.dims(name)[s.cut_dim(name)].segments if segment.axis is not None)


def queries(s: Scratch, rank: int, name: str) -> dict[int, list[int]]:
    return s.slots(name, rank, s.cut_dim(name), query_view(s, name))


def key_values(s: Scratch, like: str) -> list[tuple[str, int]]:
    """The keys' tensor and the values' of a layer, each with its slot in the view ``kv``."""
    apart = s.layer(like, "k", "v")
    if apart:
        return [(name, 0) for name in apart]
    if s.manifest.notes[like].role == "qkv":
        return [(like, 0), (like, 1)]
    raise NotHereError("keys and values are made from a latent")


def kv_heads(s: Scratch, rank: int, name: str, slot: int) -> dict[int, list[int]]:
    return s.slots(name, rank, s.cut_dim(name), "kv", slot)


def two_heads(s: Scratch, name: str) -> tuple[int, list[int], list[int]]:
    """A rank with two query heads, and where they are."""
    for rank in s.ranks():
        heads = list(queries(s, rank, name).values())
        if len(heads) > 1:
            return rank, heads[0], heads[1]
    raise NotHereError("no rank has two heads")


@mutant("heads exchanged on one rank")
def heads_exchanged(s: Scratch) -> Expected:
    """Two query heads exchanged on one rank, the output matrix not"""
    name = s.last(*Q)
    rank, a, b = two_heads(s, name)
    swap_places(s, name, rank, s.cut_dim(name), a, b)
    return block(name)


@mutant("kv heads exchanged on one rank")
def kv_heads_exchanged(s: Scratch) -> Expected:
    """Two KV heads exchanged on one rank, its query heads not"""
    for rank in s.ranks():
        for name, slot in key_values(s, s.last("q", "qkv")):
            heads = list(kv_heads(s, rank, name, slot).values())
            if len(heads) < 2:
                continue
            swap_places(s, name, rank, s.cut_dim(name), heads[0], heads[1])
        if s.touched():
            return block(name)
    raise NotHereError("no rank has two KV heads")


@mutant("q row zeroed")
def q_row_zero(s: Scratch) -> Expected:
    """One row of the query projection zero on one rank"""
    name = s.last(*Q)
    places = next(iter(queries(s, 0, name).values()))
    s.change(name, 0, lambda t: column(t, s.cut_dim(name), places[1:2], 0.0))
    return block(name)


@mutant("q scaled twice")
def q_scaled(s: Scratch) -> Expected:
    """The query projection scaled by 1/sqrt(head size) on one rank, which the model does again"""
    name = s.last(*Q)
    places = [at for head in queries(s, 1, name).values() for at in head]
    size = len(next(iter(queries(s, 1, name).values())))
    s.change(name, 1, lambda t: column(t, s.cut_dim(name), places, size**-0.5))
    return block(name)


@mutant("q of two ranks exchanged")
def q_ranks_exchanged(s: Scratch) -> Expected:
    """The query projections of two ranks exchanged, nothing else"""
    name = s.last("q", "q_b")
    exchange(s, [name])
    return block(name)


@mutant("k rope layout on one rank")
def k_rope(s: Scratch) -> Expected:
    """Key rows of one rank in the interleaved rotary order"""
    name, slot = key_values(s, s.last("q", "qkv"))[0]
    if s.manifest.origin.family in ("gpt2", "opt"):
        raise NotHereError("no rotary embedding")
    for head in kv_heads(s, 1, name, slot).values():
        permuted(s, name, 1, s.cut_dim(name), head, interleaved(head))
    return block(name)


@mutant("q and k rope layout on every rank", families=ROTARY)
def rope_everywhere(s: Scratch) -> Expected:
    """Query and key rows of all ranks in the interleaved rotary order, consistently"""
    q, k = s.last("q"), s.last("k")
    for rank in s.ranks():
        for head in queries(s, rank, q).values():
            permuted(s, q, rank, 0, head, interleaved(head))
        for head in kv_heads(s, rank, k, 0).values():
            permuted(s, k, rank, 0, head, interleaved(head))
    return block(q)


def interleaved(head: list[int]) -> list[int]:
    half = len(head) // 2
    return [head[at // 2 + (at % 2) * half] for at in range(2 * half)] + head[2 * half :]


@mutant("k zero on one rank")
def k_zero(s: Scratch) -> Expected:
    """The key rows of one rank zero"""
    name, slot = key_values(s, s.last("q", "qkv"))[0]
    places = [at for head in kv_heads(s, 1, name, slot).values() for at in head]
    s.change(name, 1, lambda t: column(t, s.cut_dim(name), places, 0.0))
    return block(name)


@mutant("two input columns of v swapped")
def v_columns(s: Scratch) -> Expected:
    """Two input columns of the value projection exchanged on one rank"""
    name = s.last("v")
    s.change(name, 0, lambda t: t[:, [1, 0, *range(2, t.shape[1])]])
    return block(name)


@mutant("k and v exchanged on one rank")
def k_and_v(s: Scratch) -> Expected:
    """Keys and values of one rank exchanged"""
    (k, k_slot), (v, v_slot) = key_values(s, s.last("q", "qkv"))
    if k != v:
        a, b = s.get(k, 0), s.get(v, 0)
        s.put(k, 0, b)
        s.put(v, 0, a)
    else:
        first = [at for head in kv_heads(s, 0, k, k_slot).values() for at in head]
        second = [at for head in kv_heads(s, 0, v, v_slot).values() for at in head]
        swap_places(s, k, 0, s.cut_dim(k), first, second)
    return block(k)


@mutant("o_proj of two ranks exchanged")
def o_exchanged(s: Scratch) -> Expected:
    """The output projections of two ranks exchanged"""
    name = s.last("o")
    exchange(s, [name])
    return block(name)


@mutant("o columns of two heads exchanged")
def o_columns(s: Scratch) -> Expected:
    """The output projection's columns of two heads exchanged on one rank, the heads not"""
    name = s.last("o")
    rank, a, b = two_heads(s, name)
    swap_places(s, name, rank, s.cut_dim(name), a, b)
    return block(name)


@mutant("wrong kv replica", families=("llama", "qwen2", "phi3", "mixtral", "gpt_oss", "qwen3", "starcoder2"))
def wrong_replica(s: Scratch) -> Expected:
    """One rank has the next KV head instead of its own"""
    parts = key_values(s, s.last("q", "qkv"))
    for rank in s.ranks():
        other = (rank + s.tp_size // 2) % s.tp_size
        held, wanted = (list(kv_heads(s, r, *parts[0])) for r in (rank, other))
        if len(held) == len(wanted) and held != wanted:
            for name, slot in parts:
                taken_from(s, name, rank, other, kv_heads(s, rank, name, slot), kv_heads(s, other, name, slot))
            return block(parts[0][0])
    raise NotHereError("every rank has all KV heads")


@mutant("kv replica r % kv", degrees=(4,))
def replica_modulo(s: Scratch) -> Expected:
    """KV heads dealt as r % kv instead of r // replicas, on all ranks"""
    parts = key_values(s, s.last("q", "qkv"))
    count = max(unit for r in s.ranks() for unit in kv_heads(s, r, *parts[0])) + 1
    if count >= s.tp_size:
        raise NotHereError("no KV head is replicated")
    where = {next(iter(kv_heads(s, rank, *parts[0]))): rank for rank in s.ranks()}
    for name, slot in parts:
        fresh = {rank: s.get(name, rank) for rank in s.ranks()}
        for rank in s.ranks():
            other = where[rank % count]
            mine, theirs = kv_heads(s, rank, name, slot), kv_heads(s, other, name, slot)
            taken_from(s, name, rank, other, mine, theirs, fresh)
    return block(parts[0][0])


@mutant("q rows off by one")
def q_off_by_one(s: Scratch) -> Expected:
    """Every rank's query rows start one row late"""
    name = s.last("q", "q_b")
    whole = s.whole(name)
    for rank in s.ranks():
        rows = [(index + 1) % whole.shape[0] for index in s.runs(name, rank, 0)]
        s.put(name, rank, whole[rows])
    return block(name)


@mutant("fused qkv read as [Q;K;V]", families=("gpt_neox", "falcon"))
def fused_in_blocks(s: Scratch) -> Expected:
    """A matrix fused head by head, cut as if all Q came first, then all K, then all V"""
    name = s.last("qkv")
    whole = s.whole(name)
    for rank in s.ranks():
        mine = s.get(name, rank).shape[0]
        each, rows = mine // 3, list[int]()
        for third in range(3):
            first = third * (whole.shape[0] // 3) + rank * each
            rows += range(first, first + each + (mine - 3 * each if third == 2 else 0))
        s.put(name, rank, whole[[row % whole.shape[0] for row in rows]])
    return block(name)


@mutant("sinks the same on two ranks")
def sinks_same(s: Scratch) -> Expected:
    """Attention sinks of rank 0 on rank 1 as well"""
    name = s.last("sinks")
    s.put(name, 1, s.get(name, 0))
    return block(name)


@mutant("sinks zero")
def sinks_zero(s: Scratch) -> Expected:
    """Attention sinks zero on one rank"""
    name = s.last("sinks")
    s.change(name, 1, torch.zeros_like)
    return block(name)


@mutant("kv_b read as blocks")
def kv_b_blocks(s: Scratch) -> Expected:
    """The latent's [nope; value] of every head cut as all nope, then all values"""
    name = s.last("kv_b")
    nope = int(s.config["qk_nope_head_dim"])
    for rank in s.ranks():
        heads = queries(s, rank, name).values()
        order = [at for head in heads for at in head[:nope]] + [at for head in heads for at in head[nope:]]
        s.change(name, rank, lambda t, order=order: t[order])  # type: ignore[misc]
    return block(name)


@mutant("rotary part first in q_b")
def q_b_order(s: Scratch) -> Expected:
    """The rotary part of every query head before the rest, on one rank"""
    name = s.last("q_b")
    nope = int(s.config["qk_nope_head_dim"])
    for head in queries(s, 1, name).values():
        permuted(s, name, 1, 0, head, head[nope:] + head[:nope])
    return block(name)


@mutant("latent differs on one rank")
def latent_differs(s: Scratch) -> Expected:
    """A row of the latent's projection, which all ranks must have alike, negated on one"""
    name = s.last("kv_a")
    s.change(name, 1, lambda t: column(t, 0, [2], -1.0))
    return module(name, 1)


@mutant("q_norm and k_norm exchanged on one rank", families=("qwen3", "qwen3_moe"))
def head_norms(s: Scratch) -> Expected:
    """The norms of queries and keys exchanged on one rank"""
    q = next(name for name in reversed(s.names("norm")) if name.endswith("q_norm.weight"))
    k = q.replace("q_norm", "k_norm")
    a, b = s.get(q, 1), s.get(k, 1)
    s.put(q, 1, b)
    s.put(k, 1, a)
    return block(q)


@mutant("lowest bit of one q weight")
def q_bit(s: Scratch) -> Expected:
    """The lowest bit of one weight of the query projection flipped"""
    name = s.last(*Q)
    s.change(name, 1, lambda t: flipped(t, 0))
    return block(name)


@mutant("lowest bit of one o weight")
def o_bit(s: Scratch) -> Expected:
    """The lowest bit of one weight of the output projection flipped"""
    name = s.last("o")
    s.change(name, 0, lambda t: flipped(t, 0))
    return block(name)


@mutant("sign of one o weight")
def o_sign(s: Scratch) -> Expected:
    """The sign of the largest weight of the output projection flipped"""
    name = s.last("o")
    s.change(name, 1, lambda t: flipped(t, 15))
    return block(name)


# -- the model stays the same -----------------------------------------------------------------------


@mutant("heads permuted with their columns", kind=EQUIVALENT)
def heads_permuted(s: Scratch) -> Expected:
    """Two query heads of one group exchanged together with everything that belongs to them"""
    q, o = s.last("q", "qkv"), s.last("o")
    group = _group(s, q)
    _no_norm_of_heads(s, q)
    _not_by_bytes(s, q, "qkv_bias")
    for rank in s.ranks():
        held = sorted(queries(s, rank, q))
        pair = next(((a, b) for a in held for b in held if a < b and a // group == b // group), None)
        if pair is None:
            continue
        for name in [*s.layer(q, "q", "qkv", "q_bias", "qkv_bias", "sinks"), o]:
            dim = s.cut_dim(name)
            places = s.slots(name, rank, dim, "query")
            swap_places(s, name, rank, dim, places[pair[0]], places[pair[1]])
        return Expected(())
    raise NotHereError("no rank has two heads of one group")


def _group(s: Scratch, q: str) -> int:
    axis = s.dims(q)[s.cut_dim(q)].axes[0]
    return axis.group if isinstance(axis, Heads) else 1


def _not_by_bytes(s: Scratch, q: str, *roles: str) -> None:
    """A bias of keys cancels in the softmax, so the verifier compares it by bytes, which are others here."""
    if s.layer(q, *roles):
        raise NotHereError("a bias of keys is compared by bytes")


def _no_norm_of_heads(s: Scratch, q: str) -> None:
    """Where queries pass through a norm of their own, its output is compared head by head, in its place."""
    attention = q.rsplit(".", 2)[0]
    if any(name.startswith(f"{attention}.") for name in s.layer(q, "norm")):
        raise NotHereError("a norm compares heads in their order")


@mutant("attention exchanged between ranks", kind=EQUIVALENT)
def attention_exchanged(s: Scratch) -> Expected:
    """Two ranks exchange all that belongs to their heads"""
    q = s.last("q", "q_b", "qkv")
    _no_norm_of_heads(s, q)
    _not_by_bytes(s, q, "k_bias", "qkv_bias")
    roles = ("q", "k", "v", "qkv", "q_b", "kv_b", "o", "q_bias", "k_bias", "v_bias", "qkv_bias", "sinks")
    exchange(s, s.layer(q, *roles))
    return Expected(())

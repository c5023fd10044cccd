"""Tensors of every kind of cut, small enough to be moved in no time, and layouts of several ranks made of them."""

from __future__ import annotations

import planned

from tpshard.axes import Dim, Heads, Padded, Units, replicated
from tpshard.layout import Cut, Layout, Piece, Stored, cut, cut_dims, held_by, whole_cut
from tpshard.matching import Logical
from tpshard.partition import Partition, interned

MOST = 12
ffn, stepped = Units("ffn", 13), Units("stepped", 38, step=3)
mha, gqa, mqa = Heads("mha", 12, 12), Heads("gqa", 24, 4), Heads("mqa", 13, 1)
odd, together, bundled = Heads("odd", 15, 5), Heads("together", 24, 6, step=2), Heads("bundled", 25, 25, step=2)
vocab, rounded, experts = Padded("vocab", 29), Padded("rounded", 61, multiple=4), Units("experts", 12)
h = replicated(3)

CUT: dict[str, tuple[str, tuple[Dim, ...]]] = {
    "column": ("BF16", (ffn.each(), h)),
    "row": ("BF16", (h, ffn.each())),
    "bias": ("F32", (ffn.each(),)),
    "gate_up": ("I8", (ffn.each() * 2, h)),
    "alternating": ("I8", (ffn.each(2), h)),
    "stepped": ("BF16", (h, stepped.each())),
    "q": ("BF16", (gqa.query(2), h)),
    "k": ("BF16", (gqa.kv(2), h)),
    "o": ("BF16", (h, gqa.query(2))),
    "mha.qkv": ("F8_E4M3", (mha.grouped(2, 2, 2), h)),
    "gqa.qkv": ("F8_E4M3", (gqa.query(2) + gqa.kv(2) * 2, h)),
    "gqa.grouped": ("U8", (h, gqa.grouped(1, 1, 1))),
    "mqa.qkv": ("I16", (mqa.query(1) + mqa.kv(1) * 2,)),
    "odd.qkv": ("BF16", (odd.grouped(2, 2, 2),)),
    "together.qkv": ("F8_E8M0", (together.query(2) + together.kv(2), h)),
    "bundled.o": ("F16", (h, bundled.query(1))),
    "embed": ("BF16", (vocab.each(), h)),
    "head.t": ("BF16", (h, rounded.each())),
    "with whole part": ("BF16", (replicated(4) + ffn.each() + replicated(1) + ffn.each(2), h)),
    "norm": ("F64", (h,)),
    "scalar": ("I64", ()),
    "empty": ("F32", (replicated(0), replicated(5))),
    "empty, cut": ("F32", (replicated(0), ffn.each())),
    "empty along the cut": ("F32", (ffn.each(0), h)),
    "experts": ("BF16", (experts.each(), h, replicated(2))),
    "experts in the middle": ("U8", (replicated(2), experts.each(), h, replicated(1))),
    "stacked gate_up": ("BF16", (replicated(4), ffn.each() * 2, replicated(2))),
    "packed": ("F4", (ffn.each(), replicated(4))),
    "packed rows": ("F6_E2M3", (h, ffn.each(4))),
}
BYTES = {name: entry for name, entry in CUT.items() if not entry[0].startswith(("F4", "F6"))}


def grid_layout(experts_on: int, tp_size: int) -> Layout:
    """Experts over one side of a grid of ranks, their features over the other; single experts on some ranks."""
    size = experts_on * tp_size
    logicals, stored = [], []

    def add(name: str, shape: tuple[int, ...], found: Cut) -> None:
        logicals.append(Logical(name, "BF16", shape))
        stored.append(Stored(name, "BF16", (Piece(name, found),)))

    def of(dim: Dim, ranks: int) -> Partition:
        return cut_dims((dim,), ranks).dims[0]

    outer, grid = of(experts.each(), experts_on), (experts_on, tp_size)
    up, down, padded = (12, 26, 2), (12, 3, 13), (2, 12, 29)
    add("up", up, cut(planned.on_grid((outer, of(ffn.each() * 2, tp_size), None), up, grid), size))
    add("down", down, cut(planned.on_grid((outer, None, of(ffn.each(), tp_size)), down, grid), size))
    add("padded", padded, cut(planned.on_grid((None, outer, of(vocab.each(), tp_size)), padded, grid), size))
    for expert in range(12):
        holder = next(i for i in range(experts_on) if expert in planned.indices(of(experts.each(), experts_on), i))
        everywhere = interned(13, of(ffn.each(), tp_size).ranks * experts_on)
        keep = [holder * tp_size + rank for rank in range(tp_size)]
        add(f"expert.{expert}", (2, 13), held_by(cut((whole_cut((2,), size).dims[0], everywhere), size), keep))
    return Layout(size, {t.name: t for t in logicals}, tuple(stored))


def fused_layout(tp_size: int, order: str = "qkv") -> Layout:
    """As an engine keeps them: renamed; q, k, v as one tensor (along either dimension); gate and up; experts."""
    shapes: dict[str, tuple[Dim, ...]] = {
        **{f"{n}.w": ((gqa.query(2) if n == "q" else gqa.kv(2)), h) for n in "qkv"},
        **{f"{n}.t": (h, (gqa.query(2) if n == "q" else gqa.kv(2))) for n in "qkv"},
        **{f"{n}.b": ((gqa.query(2) if n == "q" else gqa.kv(2)),) for n in "qkv"},
        "gate": (ffn.each(), h),
        "up": (ffn.each(), h),
        **{f"expert.{n}": (ffn.each(), h) for n in range(3)},
        "lone": (vocab.each(), h),
        "scalar": (),
    }
    logicals = {n: Logical(n, "BF16", tuple(d.extent for d in dims)) for n, dims in shapes.items()}

    def stored(name: str, *tensors: str, dim: int = 0) -> Stored:
        return Stored(name, "BF16", tuple(Piece(t, cut_dims(shapes[t], tp_size)) for t in tensors), dim)

    made = (
        stored("experts.up", *(f"expert.{n}" for n in range(3))),
        stored("qkv_proj", *(f"{n}.w" for n in order)),
        stored("qkv_proj.t", *(f"{n}.t" for n in order), dim=1),
        stored("qkv_proj.bias", *(f"{n}.b" for n in order)),
        stored("gate_up_proj", "gate", "up"),
        stored("wte", "lone"),
        stored("scale", "scalar"),
    )
    return Layout(tp_size, logicals, made)

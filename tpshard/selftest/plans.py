"""Wrong plans: tables that cut consistently, and wrongly. Bytes merge back exactly; a rank cannot run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tpshard.axes import Dim, Padded, Units, replicated
from tpshard.intervals import Run, Runs
from tpshard.table import NEEDS_SUM

from .catalogue import Expected, block, module
from .drafts import Dealt, Draft
from .scratch import NotHereError, layer_of

BOTH, ALGEBRA, RUN = ("plan", "forward"), ("plan",), ("forward",)
GROUPED = ("llama", "qwen2", "starcoder2")


@dataclass(frozen=True)
class PlanFault:
    """A wrong plan, with the families and degrees that show it."""

    name: str
    says: str
    act: Callable[[Draft], Expected]
    families: tuple[str, ...]
    degrees: tuple[int, ...]


PLANS: dict[str, PlanFault] = {}


def plan(
    name: str, *families: str, degrees: tuple[int, ...] = (2, 4)
) -> Callable[[Callable[[Draft], Expected]], Callable[[Draft], Expected]]:
    """Register a wrong plan; its description is the function's docstring."""

    def register(act: Callable[[Draft], Expected]) -> Callable[[Draft], Expected]:
        PLANS[name] = PlanFault(name, (act.__doc__ or "").strip().rstrip("."), act, families, degrees)
        return act

    return register


def seen(where: Expected, levels: tuple[str, ...] = BOTH, refused: bool = False) -> Expected:
    return Expected(where.points, None, levels, refused)


@plan("kv replica r % kv instead of r // replicas", *GROUPED, "phi3", degrees=(4,))
def kv_modulo(d: Draft) -> Expected:
    """KV heads dealt round the ranks, query heads in order"""
    name = d.name("q", "qkv")
    heads = d.heads(name)
    size = d.dims[d.name("o")][1].extent // heads.query_heads
    ranks = tuple((rank % heads.kv_heads, rank % heads.kv_heads + 1) for rank in range(d.tp_size))
    kv = Dealt("kv round", heads.kv_heads, ranks).each(size)
    if d.notes[name].role == "qkv":
        d.cut_along(name, heads.query(size) + kv + kv)
    else:
        for part in d.names("k", "v", "k_bias", "v_bias"):
            d.cut_along(part, kv)
    return seen(block(name))


@plan("q heads strided, k, v and o contiguous", *GROUPED, "opt", "olmo2", degrees=(2,))
def q_strided(d: Draft) -> Expected:
    """Query heads dealt round the ranks, everything else in order"""
    for name in d.names("q", "q_bias"):
        heads = d.heads(name)
        size = d.dims[name][0].extent // heads.query_heads
        blocks = [Units(f"heads {n}", d.tp_size).each(size) for n in range(heads.query_heads // d.tp_size)]
        d.cut_along(name, Dim(tuple(segment for dim in blocks for segment in dim.segments)))
    return seen(block(d.name("q")))


def by_heads(runs: Runs, size: int) -> list[Run]:
    return [Run(run.start + at, size) for run in runs for at in range(0, run.length, size)]


@plan("local order of q heads reversed, o not", *GROUPED, "opt", degrees=(2,))
def q_reversed(d: Draft) -> Expected:
    """A rank's query heads in the opposite order, its output columns not"""
    name = d.name("q")
    size = d.dims[name][0].extent // d.heads(name).query_heads
    d.reorder(name, lambda rank, runs: tuple(reversed(by_heads(runs, size))))
    return seen(block(name))


@plan("local order of k and v reversed, q and o not", "opt", degrees=(2,))
def kv_reversed(d: Draft) -> Expected:
    """A rank's KV heads in the opposite order, its query heads not"""
    for name in d.names("k", "v"):
        size = d.dims[name][0].extent // d.heads(name).kv_heads
        d.reorder(name, lambda rank, runs, size=size: tuple(reversed(by_heads(runs, size))))  # type: ignore[misc]
    return seen(block(d.name("q")))


@plan("gate off by one neuron", "llama", "qwen2", "gemma2", "olmo2")
def gate_off(d: Draft) -> Expected:
    """The gate's boundaries one neuron further than up's and down's"""
    name = d.name("gate")
    right = d.axis(name).bounds("unit", d.tp_size)
    last = d.tp_size - 1
    ranks = tuple(
        (start + (rank > 0), stop + (rank < last)) for rank, (start, stop) in enumerate(right)
    )
    d.cut_along(name, Dealt("gate", right[-1][1], ranks).each())
    return seen(block(name))


@plan("half KV heads", *GROUPED, degrees=(4,))
def half_heads(d: Draft) -> Expected:
    """2 KV heads cut over 4 ranks: half a head each"""
    for name in d.names("k", "v", "k_bias", "v_bias"):
        at = d.cut_dim(name)
        d.cut_along(name, Units("kv rows", d.dims[name][at].extent).each())
    return seen(block(d.name("q")))


@plan("one and a half heads", *GROUPED, degrees=(4,))
def one_and_a_half(d: Draft) -> Expected:
    """6 query heads cut over 4 ranks: one and a half each"""
    for name in d.names("q", "o", "q_bias"):
        at = d.cut_dim(name)
        d.cut_along(name, Units("query rows", d.dims[name][at].extent).each())
    return seen(block(d.name("q")))


def in_halves(d: Draft, *roles: str) -> Expected:
    for name in d.names(*roles):
        heads = d.heads(name)
        query = d.notes[name].role.startswith("q")
        size = d.dims[name][0].extent // (heads.query_heads if query else heads.kv_heads)
        d.cut_along(name, (heads.query(size // 2) if query else heads.kv(size // 2)) * 2)
    return block(d.name("q"))


@plan("q in two halves, k and v not", *GROUPED, "olmo2", degrees=(2,))
def q_in_halves(d: Draft) -> Expected:
    """The query projection cut as pairs of heads, one of each half of it"""
    return seen(in_halves(d, "q", "q_bias"))


@plan("q, k and v in two halves, o not", *GROUPED, degrees=(2,))
def all_in_halves(d: Draft) -> Expected:
    """Heads cut as pairs, one of each half, in a model whose heads are single"""
    return seen(in_halves(d, "q", "k", "v", "q_bias", "k_bias", "v_bias"), RUN)


@plan("head whole on every rank", "llama", "qwen2", "gpt_neox")
def head_whole(d: Draft) -> Expected:
    """The output head on every rank: what is gathered holds every row N times"""
    name = d.name("head")
    d.keep_whole(name)
    return seen(module(name))


@plan("head along another axis than the embedding", "llama", "qwen2", "gpt_neox")
def head_apart(d: Draft) -> Expected:
    """The output head's rows dealt as an axis of their own, the embedding's as the vocabulary"""
    name = d.name("head")
    d.cut_along(name, Units("rows of the head", d.dims[name][0].extent).each())
    return seen(module(name), ALGEBRA)


def vocabulary(d: Draft, shift: int) -> Expected:
    points: list[str] = []
    for name, note in d.notes.items():
        if note.role not in ("embed", "head"):
            continue
        count = d.dims[name][0].extent
        right = Padded("v", count).bounds("unit", d.tp_size)
        ranks = tuple((start + (shift if rank else 0), stop) for rank, (start, stop) in enumerate(right))
        d.cut_along(name, Dealt("vocabulary", count, ranks).each())
        points += module(name).points
    points += [alias.rpartition(".")[0] for alias in d.aliases]
    return Expected(tuple(points), levels=BOTH)


@plan("vocabulary ranges overlap by a row", "llama", "gemma2", "gpt2")
def overlap(d: Draft) -> Expected:
    """Every rank but the first starts one vocabulary row early"""
    return vocabulary(d, -1)


@plan("vocabulary hole of a row", "llama", "gemma2", "gpt2")
def hole(d: Draft) -> Expected:
    """Every rank but the first starts one vocabulary row late"""
    return vocabulary(d, 1)


@plan("q cut on the input", "llama", "opt", "gemma2")
def q_input(d: Draft) -> Expected:
    """The query projection cut by columns where it must be cut by rows"""
    name = d.name("q")
    d.dims[name] = (replicated(d.dims[name][0].extent), Units("inputs", d.dims[name][1].extent).each())
    return seen(block(name))


@plan("o cut on the output", "llama", "gpt_neox", "falcon")
def o_output(d: Draft) -> Expected:
    """The output projection cut by rows where it must be cut by columns"""
    name = d.name("o")
    d.dims[name] = (Units("outputs", d.dims[name][0].extent).each(), replicated(d.dims[name][1].extent))
    return seen(block(name))


@plan("down_proj left whole", "llama", "gpt2", "opt", "gpt_neox", "falcon")
def down_whole(d: Draft) -> Expected:
    """Down whole on every rank: the sum has it N times"""
    name = d.name("down")
    d.keep_whole(name)
    return seen(block(name))


@plan("expert down_proj left whole", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
def experts_whole(d: Draft) -> Expected:
    """Down of all experts whole on every rank"""
    for name in d.names("expert_down"):
        d.keep_whole(name)
    return seen(block(d.name("expert_down")))


@plan("row bias on all ranks", "opt", "gpt_neox", "gpt2", "starcoder2")
def bias_everywhere(d: Draft) -> Expected:
    """The bias of a row-parallel matrix whole on every rank, and nothing says that it is added once"""
    d.note(d.name("down_bias"), "")
    return seen(block(d.name("down")), ALGEBRA)


@plan("row bias cut along its width", "opt", "gpt_neox", "starcoder2")
def bias_cut(d: Draft) -> Expected:
    """The bias of a row-parallel matrix cut like that of a column-parallel one"""
    name = d.name("down_bias")
    d.dims[name] = (Units("outputs", d.dims[name][0].extent).each(),)
    return seen(block(name))


@plan("fused qkv cut as [Q;K;V]", "gpt_neox", "falcon", degrees=(2,))
def fused_blocks(d: Draft) -> Expected:
    """A matrix fused head by head cut as three blocks"""
    for name in d.names("qkv", "qkv_bias"):
        heads = d.heads(name)
        size = d.dims[name][0].extent // (heads.query_heads + 2 * heads.kv_heads)
        d.cut_along(name, heads.query(size) + heads.kv(size) * 2)
    return seen(block(d.name("qkv")), RUN)


@plan("fused gate_up cut contiguously", "phi3")
def gate_up_contiguous(d: Draft) -> Expected:
    """[gate; up] cut as one: the first ranks have all of the gate"""
    name = d.name("gate_up")
    d.cut_along(name, Units("both", d.dims[name][0].extent).each())
    return seen(block(name))


@plan("fused qkv cut contiguously", "phi3", "gpt2")
def qkv_contiguous(d: Draft) -> Expected:
    """[q; k; v] cut as one: the first ranks have all of q"""
    for name in d.names("qkv", "qkv_bias"):
        d.cut_along(name, Units("all", d.dims[name][d.cut_dim(name)].extent).each())
    return seen(block(d.name("qkv")))


@plan("local layout [k;q;v]", "phi3")
def kqv(d: Draft) -> Expected:
    """A rank's fused matrix with the keys first"""
    name = d.name("qkv")
    d.reorder(name, lambda rank, runs: (runs[1], runs[0], *runs[2:]))
    return seen(block(name))


@plan("norm over heads whole", "olmo2")
def norm_whole(d: Draft) -> Expected:
    """The norm over all heads whole on every rank, which has only its own heads"""
    for name in _head_norms(d):
        d.keep_whole(name)
        d.note(name, "")
    return seen(block(d.name("q")))


@plan("norm over heads cut without a sum", "olmo2")
def norm_unsummed(d: Draft) -> Expected:
    """The norm over all heads cut, each rank normalising by its own"""
    for name in _head_norms(d):
        d.note(name, "")
    return seen(block(d.name("q")))


def _head_norms(d: Draft) -> list[str]:
    names = [name for name, note in d.notes.items() if note.text == NEEDS_SUM]
    if not names:
        raise NotHereError("no norm over all heads")
    return [name for name in names if layer_of(name) == layer_of(names[-1])]


@plan("norm between v and o", "bitnet")
def norm_between(d: Draft) -> Expected:
    """Norms over all heads' outputs (and all neurons) taken for ones that every rank can do alone"""
    return Expected(("*.self_attn.*", "*.mlp.*"), levels=BOTH)


@plan("alternating gate and up cut as blocks", "gpt_oss")
def alternating(d: Draft) -> Expected:
    """[gate up gate up ...] cut as [gate; up]"""
    for name in d.names("expert_gate_up", "expert_gate_up_bias"):
        axis = d.axis(name)
        assert isinstance(axis, Units)
        d.cut_along(name, axis.each() * 2)
    return seen(block(d.name("expert_gate_up")), RUN)


@plan("kv_b cut as blocks", "deepseek_v3", degrees=(2,))
def kv_b_blocks(d: Draft) -> Expected:
    """The latent's [nope; value] of every head cut as two blocks"""
    name = d.name("kv_b")
    axis = d.axis(name)
    assert isinstance(axis, Units)
    nope, value = int(d.config["qk_nope_head_dim"]), int(d.config["v_head_dim"])
    d.cut_along(name, axis.each(nope) + axis.each(value))
    return seen(block(name), RUN)


@plan("state-space input cut contiguously", "mamba2", degrees=(2,))
def ssm_contiguous(d: Draft) -> Expected:
    """The five blocks of the input matrix cut as one"""
    name = d.name("ssm_in")
    d.cut_along(name, Units("all", d.dims[name][0].extent).each())
    return seen(block(name))


@plan("state-space groups forgotten", "mamba2", degrees=(2,))
def ssm_swapped(d: Draft) -> Expected:
    """dt taken for the first of the five blocks"""
    name = d.name("ssm_in")
    x = d.dims[name][0].segments
    d.cut_along(name, Dim((x[-1], *x[:-1])))
    return seen(block(name), RUN)


@plan("router cut", "mixtral", "qwen3_moe")
def router_cut(d: Draft) -> Expected:
    """The router cut by experts, which every rank needs whole"""
    name = d.name("router")
    d.dims[name] = (Units("experts", d.dims[name][0].extent).each(), d.dims[name][1])
    return seen(block(name))

"""What mixes a sequence without attention, each block said once: state spaces, delta nets, short convolutions.

Like :mod:`tpshard.blocks`: a table calls them with its family's names and numbers. All of them hold a state for
every head or channel, so they are cut by heads or channels and need one sum at their end; what some need besides
is said with each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import NamedTuple

from tpshard.axes import AnyDim, Dim, Heads, Segment, Units
from tpshard.config import Config
from tpshard.table import Table

from .dense import heads_of, norms

ATTENTION = ("full_attention", "attention", "sliding_attention")  # spellings in lists of layer types
RECURRENT = ("linear_attention", "mamba", "recurrent", "conv")


def layers_of(types: Sequence[object], *kinds: str) -> frozenset[int]:
    """The numbers of the layers that are of one of ``kinds``."""
    return frozenset(number for number, kind in enumerate(types) if kind in kinds)


def every_nth(count: int, n: int, nth: str, other: str) -> list[str]:
    """Layer types where every ``n``-th layer, the first of them number ``n - 1``, is another."""
    return [other if (number + 1) % n else nth for number in range(count)]


# -- state spaces ---------------------------------------------------------------------------------------


def widened(c: Config, *keys: str, default: int = 2) -> int:
    """The channels inside a state-space mixer: ``hidden_size`` times the first of ``keys`` (``expand``)."""
    return c.count("hidden_size") * c.count(*keys, default=default)


def time_step_rank(c: Config, *keys: str) -> int:
    """The width of Mamba-1's latent time step: a number, or ``"auto"`` for a sixteenth of ``hidden_size``."""
    if c.get(*keys, default="auto") == "auto":
        return ceil(c.count("hidden_size") / 16)
    return c.count(*keys)


def mamba1(
    t: Table, at: str, channels: Dim, hidden: int, *, state: int, rank: int, kernel: int,
    bias: bool = False, conv_bias: bool = True,
) -> None:  # fmt: skip
    """Mamba-1's mixer, cut by channels: ``in_proj [x; z]``, a convolution, ``x_proj``, ``dt_proj``, ``out_proj``.

    ``x_proj`` makes the time step, B and C, which all channels share, from all channels: it is row-parallel inside
    the mixer, a small sum over ranks that goes back into it.

    Source: arXiv 2312.00752; transformers ``models/mamba/modeling_mamba.py`` (``MambaMixer``).
    """
    t.linear(f"{at}.in_proj", channels * 2, hidden, role="ssm_in", bias=bias)
    convolution(t, f"{at}.conv1d", channels, kernel, role="ssm_conv", bias=conv_bias)
    t.linear(f"{at}.x_proj", rank + 2 * state, channels, role="ssm_x")
    t.linear(f"{at}.dt_proj", channels, rank, role="ssm_dt", bias=True)
    t.tensor(f"{at}.A_log", channels, state, role="ssm_head")
    t.tensor(f"{at}.D", channels, role="ssm_head")
    t.linear(f"{at}.out_proj", hidden, channels, role="ssm_out", bias=bias)


def state_heads(heads: int, groups: int) -> Heads:
    """The axis of Mamba-2: state-space heads in groups that share B and C, as query heads share keys and values."""
    return Heads("ssm_heads", heads, groups, noun="state-space heads", group_noun="state-space groups")


def mamba2(
    t: Table, at: str, heads: Heads, hidden: int, *, size: int, state: int, kernel: int,
    bias: bool = False, out_bias: bool | None = None, conv_bias: bool = True, norm: bool = True,
) -> None:  # fmt: skip
    """Mamba-2's mixer, cut by heads: ``in_proj [z; x; B; C; dt]``, a convolution over x, B and C, ``out_proj``.

    Ranks that share a group hold its B and C each. The gated norm takes its statistics over a whole group:
    ranks that hold parts of one have to sum them.

    Source: arXiv 2405.21060; transformers ``models/mamba2/modeling_mamba2.py`` (``Mamba2Mixer``).
    """
    x, groups, one = heads.query(size), heads.kv(state), heads.query(1)
    t.linear(f"{at}.in_proj", x + x + groups + groups + one, hidden, role="ssm_in", bias=bias)
    convolution(t, f"{at}.conv1d", x + groups + groups, kernel, role="ssm_conv", bias=conv_bias)
    for name in ("A_log", "D", "dt_bias"):
        t.tensor(f"{at}.{name}", one, role="ssm_head")
    if norm:
        t.norm(f"{at}.norm", x)
    t.linear(f"{at}.out_proj", hidden, x, role="ssm_out", bias=bias if out_bias is None else out_bias)


def convolution(
    t: Table, name: str, channels: AnyDim, kernel: int, *, role: str = "linear_conv", bias: bool | None = False
) -> None:
    """A convolution along the sequence, every channel by itself: ``weight [channels, 1, kernel]``."""
    t.tensor(f"{name}.weight", channels, 1, kernel, role=role)
    if bias is not False:
        t.tensor(f"{name}.bias", channels, role=f"{role}_bias", optional=bias is None)


# -- linear attention -----------------------------------------------------------------------------------


class DeltaHeads(NamedTuple):
    """The dimensions of a gated delta net: value heads in groups that share a key head.

    ``size`` is that of a value head.
    """

    heads: Heads
    key: Dim
    value: Dim
    one: Dim
    size: int

    @property
    def qkv(self) -> Dim:
        """Queries, keys and values, one after the other."""
        return self.key + self.key + self.value

    def grouped(self, *parts: tuple[str, int]) -> Dim:
        """A dimension stored key head by key head; each part is ``("kv" or "query", indices a head)``."""
        segments = []
        for number in range(self.heads.kv_heads):
            for view, size in parts:
                each = 1 if view == "kv" else self.heads.group
                segments.append(Segment(self.heads, view, number * each, (number + 1) * each, size))
        return Dim(tuple(segments))


def delta_heads(c: Config) -> DeltaHeads:
    """The heads that ``linear_num_value_heads`` and ``linear_num_key_heads`` count."""
    heads = Heads(
        "linear_heads", c.count("linear_num_value_heads"), c.count("linear_num_key_heads"),
        noun="value heads", group_noun="key heads",
    )  # fmt: skip
    size = c.count("linear_value_head_dim")
    return DeltaHeads(heads, heads.kv(c.count("linear_key_head_dim")), heads.query(size), heads.query(1), size)


def delta_net(
    t: Table, at: str, d: DeltaHeads, hidden: int, *, ins: Mapping[str, Dim], convolutions: Mapping[str, Dim],
    kernel: int, norm: str = "norm", out: str = "out_proj",
) -> None:  # fmt: skip
    """A gated delta net, cut by value heads; ranks that share a key head hold it each.

    Args:
        ins: the matrices that lead from the hidden state into it, and how their rows lie.
        convolutions: over queries, keys and values, together or apart.
        norm: of every value head by itself, so whole.

    Source: arXiv 2412.06464; transformers ``models/qwen3_next/modeling_qwen3_next.py`` (``Qwen3NextGatedDeltaNet``).
    """
    for name, rows in ins.items():
        t.linear(f"{at}.{name}", rows, hidden, role="linear_in")
    for name, channels in convolutions.items():
        convolution(t, f"{at}.{name}", channels, kernel)
    for name in ("A_log", "dt_bias"):
        t.tensor(f"{at}.{name}", d.one, role="linear_head")
    t.norm(f"{at}.{norm}", d.size)
    t.linear(f"{at}.{out}", hidden, d.value, role="linear_out")


def kimi_delta_attention(
    t: Table, at: str, heads: Units, size: int, hidden: int, *, kernel: int, a_log: Sequence[int | Dim],
    low_rank: bool, out: str = "o_proj",
) -> None:  # fmt: skip
    """Kimi delta attention, a delta net that forgets channel by channel, cut by heads.

    With ``low_rank`` the gates ``f`` and ``g`` go through a latent of one head's width, which every rank holds.
    ``a_log`` is the shape of ``A_log``.

    Source: arXiv 2510.26692; transformers ``models/kimi_linear/modeling_kimi_linear.py``.
    """
    wide, one = heads.each(size), heads.each()
    for name in ("q", "k", "v"):
        t.linear(f"{at}.{name}_proj", wide, hidden, role="linear_in")
        convolution(t, f"{at}.{name}_conv1d", wide, kernel)
    for name in ("f", "g"):
        if low_rank:
            t.whole(f"{at}.{name}_a_proj.weight", size, hidden, why="a latent of one head's width that all heads read")
        t.linear(f"{at}.{name}{'_b' if low_rank else ''}_proj", wide, size if low_rank else hidden, role="linear_in")
    t.linear(f"{at}.b_proj", one, hidden, role="linear_in")
    t.tensor(f"{at}.A_log", *a_log, role="linear_head")
    t.tensor(f"{at}.dt_bias", wide, role="linear_head")
    t.norm(f"{at}.o_norm", size)
    t.linear(f"{at}.{out}", hidden, wide, role="linear_out")


def query_gated_attention(c: Config, t: Table, at: str) -> None:
    """Attention with a gate beside every query head, rows ``[head][query; gate]``, and a norm on each head.

    It stands between gated delta nets in Qwen3-Next, Qwen3.5 and Qwen4; heads of 256 where the config says nothing.

    Source: transformers ``models/qwen3_next/modeling_qwen3_next.py`` (``Qwen3NextAttention``).
    """
    hidden, heads, bias = c.count("hidden_size"), heads_of(c), c.flag("attention_bias", default=False)
    size = c.head_dim(heads.query_heads, default=256)
    t.linear(f"{at}.q_proj", heads.query(2 * size), hidden, role="q_gate", bias=bias)
    t.linear(f"{at}.k_proj", heads.kv(size), hidden, role="k", bias=bias)
    t.linear(f"{at}.v_proj", heads.kv(size), hidden, role="v", bias=bias)
    t.linear(f"{at}.o_proj", hidden, heads.query(size), role="o", bias=bias)
    norms(t, at, ("q_norm", "k_norm"), size)


def short_convolution(t: Table, at: str, hidden: int, kernel: int, *, bias: bool = False) -> None:
    """LFM2's gated short convolution, cut by channels: ``in_proj [B; C; x]``, the convolution, ``out_proj``.

    Source: transformers ``models/lfm2/modeling_lfm2.py`` (``Lfm2ShortConv``).
    """
    channels = Units("conv_channels", hidden, noun="convolution channels").each()
    t.linear(f"{at}.in_proj", channels * 3, hidden, role="linear_in", bias=bias)
    convolution(t, f"{at}.conv", channels, kernel, bias=bias)
    t.linear(f"{at}.out_proj", hidden, channels, role="linear_out", bias=bias)

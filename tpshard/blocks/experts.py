"""Mixtures of experts: which layers hold them, and what stands beside the experts in those that do.

Where :mod:`.blocks` says the experts themselves, this module says the rest: dense and expert layers from the
config, the router with its correction, the MLP that every token takes, the layers that predict further tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tpshard.axes import Dim, Units
from tpshard.config import Config
from tpshard.errors import DamagedError
from tpshard.table import Table

from .dense import GATED, experts, gated_mlp, norms

SHARED = "shared_experts"
CORRECTION = "gate.e_score_correction_bias"
DRAFTS = "predicts further tokens beside the model, which does not run it; it is a layer or a few of many"


class Layers(NamedTuple):
    """Numbers of the layers with one MLP, and of those with experts."""

    dense: frozenset[int]
    sparse: frozenset[int]


def mixed_layers(
    c: Config, *, first_dense: int = 0, key: str = "first_k_dense_replace", predicted: int = 0
) -> Layers:
    """Dense and expert layers: as ``mlp_layer_types`` says, else the first ``key`` (``first_dense``) are dense.

    ``predicted`` layers past the last hold experts.

    Raises:
        DamagedError: ``mlp_layer_types`` has other words than ``dense`` and ``sparse``, or too few.
    """
    count = c.count("num_hidden_layers")
    if c.get("mlp_layer_types") is None:
        dense = frozenset(range(min(c.number(key, default=first_dense), count)))
    else:
        kinds = c.listed("mlp_layer_types", count)
        strange = [kind for kind in kinds if kind not in ("dense", "sparse")]
        if strange:
            raise DamagedError(
                f"config.json: 'mlp_layer_types' has {strange[0]!r}, where 'dense' or 'sparse' is expected; correct it"
            )
        dense = frozenset(at for at, kind in enumerate(kinds) if kind == "dense")
    return Layers(dense, frozenset(range(count + predicted)) - dense)


def layers_where(c: Config, of: Iterable[bool]) -> Layers:
    """Dense and expert layers by a rule of the family: the layers for which ``of`` is true hold experts."""
    sparse = frozenset(at for at, holds in enumerate(of) if holds)
    return Layers(frozenset(range(c.count("num_hidden_layers"))) - sparse, sparse)


def shared_channels(count: int) -> Dim | None:
    """The channels of the MLP that every token takes beside its experts; None where there are none."""
    return Units("shared_ffn", count, noun="channels of the shared experts").each() if count else None


def mixture(
    t: Table,
    at: str,
    count: int,
    ffn: Dim,
    hidden: int,
    *,
    router: str = "gate",
    correction: str | None = None,
    shared: Dim | None = None,
    shared_name: str = SHARED,
    bias: bool | None = False,
    names: tuple[str, str, str] = GATED,
    either_way: bool = False,
) -> None:
    """An expert layer's MLP below the module ``at``: router, experts apart or stacked, and the shared MLP.

    Args:
        count: how many experts; ``ffn`` the channels of every one.
        router: name of the router's matrix; ``correction`` that of its bias for the choice of experts.
        shared: channels of the MLP that every token takes, below the module ``shared_name``; ``bias`` its bias.
        names: of gate, up and down where experts are stored apart.
        either_way: whether some releases store the stacked experts input x output.
    """
    t.linear(f"{at}.{router}", count, hidden, role="router")
    if correction is not None:
        t.tensor(f"{at}.{correction}", count, role="router_bias")
    if shared is not None:
        gated_mlp(t, f"{at}.{shared_name}", shared, hidden, bias=bias, part="shared_")
    experts(t, f"{at}.experts", count, ffn, hidden, names=names, either_way=either_way)
    t.one_of("experts", "stacked experts")


def prediction(t: Table, layer: str, vocab: Dim, hidden: int) -> None:
    """What DeepSeek-V3's layers past the last hold beside a decoder layer: they predict further tokens.

    Their embedding and head repeat the model's own and may be left out.
    Source: ``README_WEIGHTS.md`` of deepseek-ai/DeepSeek-V3.
    """
    with t.block("prediction"):
        norms(t, layer, ("enorm", "hnorm", "shared_head.norm"), hidden)
        t.linear(f"{layer}.eh_proj", hidden, 2 * hidden, role="prediction_projection")
        t.linear(f"{layer}.shared_head.head", vocab, hidden, role="prediction_head", optional=True)
        t.linear(f"{layer}.embed_tokens", vocab, hidden, role="prediction_embed", optional=True)

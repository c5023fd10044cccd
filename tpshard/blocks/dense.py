"""The blocks that most models are made of, each said once: attention, feed-forward, experts, latent attention.

A table calls them with its family's names and numbers; what is peculiar to a family it says in rules of its
own. Each takes the table, the name of the module around, and dimensions; none reads a config except
:func:`heads_of` and :func:`vocabulary_of`, which read the keys that transformers uses throughout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tpshard.axes import AnyDim, Dim, Heads, Padded, Units
from tpshard.config import Config
from tpshard.table import NEEDS_GATHER, Table

GATED = ("gate_proj", "up_proj", "down_proj")
MIXTRAL = ("w1", "w3", "w2")  # gate, up, down


def heads_of(c: Config, *, default_kv: int | None = None) -> Heads:
    """The attention heads that ``num_attention_heads`` and ``num_key_value_heads`` count."""
    query = c.count("num_attention_heads")
    return Heads("heads", query, c.count("num_key_value_heads", default=default_kv or query))


def channels_of(c: Config, *keys: str) -> Dim:
    """The feed-forward channels that the first of ``keys`` (``intermediate_size``) counts."""
    return Units("ffn", c.count(*(keys or ("intermediate_size",))), noun="feed-forward channels").each()


def vocabulary_of(c: Config) -> Dim:
    """The vocabulary that ``vocab_size`` counts."""
    return Padded("vocab", c.count("vocab_size")).each()


def decoder(
    c: Config,
    *,
    prefixes: Sequence[str] = ("model.", ""),
    experts: int = 0,
    extra_layers: int = 0,
    idle_experts: int = 0,
    tied: bool = False,
    norm: str | None = "norm",
    norm_bias: bool | None = False,
    head_bias: bool | None = False,
) -> Table:
    """A table of ``num_hidden_layers`` layers with ``embed_tokens``, a last norm and ``lm_head``.

    ``tied`` is what the family takes where the config has no ``tie_word_embeddings``; ``norm`` is the last
    norm's name, None where it has no weights.
    """
    hidden, vocab = c.count("hidden_size"), vocabulary_of(c)
    t = Table(c.count("num_hidden_layers"), experts, extra_layers, prefixes, idle_experts=idle_experts)
    t.embedding("@embed_tokens", vocab, hidden)
    if norm is not None:
        t.norm(f"@{norm}", hidden, bias=norm_bias)
    is_tied = c.flag("tie_word_embeddings", default=tied)
    t.head("lm_head", vocab, hidden, tied_to="@embed_tokens.weight" if is_tied else None, bias=head_bias)
    return t


def attention(
    t: Table,
    at: str,
    q: Dim,
    kv: Dim,
    hidden: AnyDim | None,
    *,
    o: Dim | None = None,
    v: Dim | None = None,
    bias: bool | None = False,
    out_bias: bool | None = False,
    names: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj"),
    kv_from: AnyDim | None = None,
) -> None:
    """Separate query, key, value and output matrices below the module ``at``.

    Args:
        q: rows of the query matrix; ``kv`` those of key and value, unless ``v`` gives the value's.
        hidden: what goes in and out, kept whole.
        o: columns of the output matrix, where they are not as many as the query's rows.
        bias: of query, key and value; ``out_bias``: of the output matrix. None: there may be one.
        kv_from: the width that keys and values are made from, where it is another (cross attention).
    """
    source = hidden if kv_from is None else kv_from
    query, key, value, out = names
    t.linear(f"{at}.{query}", q, hidden, role="q", bias=bias)
    t.linear(f"{at}.{key}", kv, source, role="k", bias=bias)
    t.linear(f"{at}.{value}", v or kv, source, role="v", bias=bias)
    t.linear(f"{at}.{out}", hidden, o or q, role="o", bias=out_bias)


def gated_mlp(
    t: Table,
    at: str,
    ffn: Dim,
    hidden: AnyDim | None,
    *,
    bias: bool | None = False,
    names: tuple[str, str, str] = GATED,
    part: str = "",
    optional: bool = False,
) -> None:
    """``gate``, ``up`` and ``down`` below the module ``at``; ``part`` is put before the roles (``shared_``)."""
    gate, up, down = names
    t.linear(f"{at}.{gate}", ffn, hidden, role=f"{part}gate", bias=bias, optional=optional)
    t.linear(f"{at}.{up}", ffn, hidden, role=f"{part}up", bias=bias, optional=optional)
    t.linear(f"{at}.{down}", hidden, ffn, role=f"{part}down", bias=bias, optional=optional)


def fused_mlp(
    t: Table,
    at: str,
    ffn: Dim,
    hidden: AnyDim | None,
    *,
    bias: bool | None = False,
    names: tuple[str, str] = ("gate_up_proj", "down_proj"),
    part: str = "",
) -> None:
    """``[gate; up]`` in one matrix, and ``down``, below the module ``at``."""
    t.linear(f"{at}.{names[0]}", ffn * 2, hidden, role=f"{part}gate_up", bias=bias)
    t.linear(f"{at}.{names[1]}", hidden, ffn, role=f"{part}down", bias=bias)


def mlp(
    t: Table,
    at: str,
    ffn: Dim,
    hidden: AnyDim | None,
    *,
    bias: bool | None = True,
    names: tuple[str, str] = ("fc1", "fc2"),
) -> None:
    """Two matrices without a gate below the module ``at``."""
    t.linear(f"{at}.{names[0]}", ffn, hidden, role="up", bias=bias)
    t.linear(f"{at}.{names[1]}", hidden, ffn, role="down", bias=bias)


def norms(t: Table, at: str, names: Iterable[str], width: AnyDim | None, *, bias: bool | None = False) -> None:
    """Several norms of one width below the module ``at``."""
    for name in names:
        t.norm(f"{at}.{name}", width, bias=bias)


def expert_channels(c: Config, *keys: str) -> Dim:
    """The channels of every routed expert that the first of ``keys`` counts."""
    return Units("expert_ffn", c.count(*keys), noun="channels of every expert").each()


def experts(
    t: Table,
    at: str,
    count: int,
    ffn: Dim,
    hidden: int,
    *,
    names: tuple[str, str, str] = GATED,
    bank: str | None = None,
    also: Sequence[str] = (),
    either_way: bool = False,
) -> None:
    """Routed experts, cut inside every one along its own width, in the forms that released files have.

    The experts are stored apart, as ``AT.{expert}.NAME.weight``, or stacked as transformers 5 holds them,
    ``gate_up_proj [count, 2 * width, hidden]`` and ``down_proj [count, hidden, width]``. A layer that has
    one of the two forms has all of it; to demand that layers have one, say
    ``t.one_of("experts", "stacked experts", *also)``.

    Args:
        at: the module of the experts (``...mlp.experts``).
        bank: the module of the stacked ones where it is another.
        also: blocks that a layer may have instead (``"dense"``); given, :meth:`Table.one_of` is said here.
        either_way: whether some releases store the stacked ones input x output.
    """
    gate, up, down = names
    with t.block("experts"):
        t.linear(f"{at}.{{expert}}.{gate}", ffn, hidden, role="expert_gate")
        t.linear(f"{at}.{{expert}}.{up}", ffn, hidden, role="expert_up")
        t.linear(f"{at}.{{expert}}.{down}", hidden, ffn, role="expert_down")
    with t.block("stacked experts"):
        first, second = f"{bank or at}.gate_up_proj", f"{bank or at}.down_proj"
        t.tensor(first, count, ffn * 2, hidden, role="expert_gate_up", either_way=either_way)
        t.tensor(second, count, hidden, ffn, role="expert_down", either_way=either_way)
    if also:
        t.one_of("experts", "stacked experts", *also)


def latent_attention(
    c: Config, t: Table, at: str, *, bias: bool | None = False, axis: str = "heads", gathered: bool = False,
    out: str = "o_proj",
) -> Units:  # fmt: skip
    """Multi-head latent attention as DeepSeek-V2 stores it, with or without a latent for the queries.

    What leads to the latents (``q_a_proj``, ``kv_a_proj_with_mqa``) and their norms are whole; what leads from
    a latent to the heads is cut by head. ``bias`` is that of the former and of the output matrix, ``axis`` the
    name of the axis of the heads, which is returned. With ``gathered`` the way to the queries' latent is cut too,
    and the latent put together before its norm: for models in which that matrix is a large part of a layer.

    Source: arXiv 2405.04434; transformers ``models/deepseek_v3/modeling_deepseek_v3.py``.
    """
    hidden = c.count("hidden_size")
    heads = Units(axis, c.count("num_attention_heads"), noun="attention heads")
    query = heads.each(c.count("qk_nope_head_dim") + c.count("qk_rope_head_dim"))
    if c.get("q_lora_rank") is None:
        t.linear(f"{at}.q_proj", query, hidden, role="q")
    else:
        latent = query_latent(c, t, at, bias=bias, gathered=gathered)
        t.linear(f"{at}.q_b_proj", query, latent, role="q_b")
    latent_keys(c, t, at, heads, bias=bias, out=out)
    return heads


def query_latent(c: Config, t: Table, at: str, *, bias: bool | None = False, gathered: bool = False) -> int:
    """The way to the queries' latent and its norm, as :func:`latent_attention` has them; returns its width."""
    hidden, latent = c.count("hidden_size"), c.count("q_lora_rank")
    if gathered:
        cut = Units("q_latent", latent, noun="channels of the queries' latent", or_whole=True).each()
        t.linear(f"{at}.q_a_proj", cut, hidden, role="gathered", bias=bias, note=NEEDS_GATHER)
    else:
        t.linear(f"{at}.q_a_proj", latent, hidden, role="q_a", bias=bias)
    t.norm(f"{at}.q_a_layernorm", latent)
    return latent


def latent_keys(
    c: Config, t: Table, at: str, heads: Units, *, bias: bool | None = False, out: str = "o_proj"
) -> None:
    """Keys and values from their latent, and the output matrix, as :func:`latent_attention` has them."""
    hidden, latent, value = c.count("hidden_size"), c.count("kv_lora_rank"), c.count("v_head_dim")
    t.linear(f"{at}.kv_a_proj_with_mqa", latent + c.count("qk_rope_head_dim"), hidden, role="kv_a", bias=bias)
    t.norm(f"{at}.kv_a_layernorm", latent)
    t.linear(f"{at}.kv_b_proj", heads.each(c.count("qk_nope_head_dim") + value), latent, role="kv_b")
    t.linear(f"{at}.{out}", hidden, heads.each(value), role="o", bias=bias)


def token_indexer(c: Config, t: Table, at: str) -> None:
    """What chooses the tokens that a query sees (DeepSeek sparse attention), whole: all ranks must choose the same.

    Source: transformers ``models/deepseek_v32/modeling_deepseek_v32.py``.
    """
    heads, size, why = c.count("index_n_heads"), c.count("index_head_dim"), "every rank chooses the same tokens"
    t.whole(f"{at}.wq_b.weight", heads * size, c.count("q_lora_rank"), why=why)
    t.whole(f"{at}.wk.weight", size, c.count("hidden_size"), why=why)
    t.whole(f"{at}.weights_proj.weight", heads, c.count("hidden_size"), why=why)
    t.norm(f"{at}.k_norm", size, bias=True)


def layer_inputs(t: Table, c: Config, layer: str) -> None:
    """Gemma's embeddings for every layer: one table for all, and in each layer a gate to few channels and back.

    The table is cut along its vocabulary and summed, the gate by channels. Source: transformers
    ``models/gemma3n/modeling_gemma3n.py``, ``models/gemma4/modeling_gemma4.py``.
    """
    hidden, width = c.count("hidden_size"), c.count("hidden_size_per_layer_input")
    every = c.count("num_hidden_layers") * width
    t.embedding("@embed_tokens_per_layer", Padded("layer_vocab", c.count("vocab_size_per_layer_input")).each(), every)
    t.whole("@per_layer_model_projection.weight", every, hidden, why="a norm of every layer's part follows")
    t.norm("@per_layer_projection_norm", width)
    channels = Units("layer_input", width, noun="channels of a layer's input", or_whole=True).each()
    t.linear(f"{layer}.per_layer_input_gate", channels, hidden, role="low_in")
    t.linear(f"{layer}.per_layer_projection", hidden, channels, role="low_out")
    t.norm(f"{layer}.post_per_layer_input_norm", hidden)

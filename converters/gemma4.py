"""Gemma 4: two kinds of attention with heads of their own sizes, keys shared by the last layers, an embedding a layer.

Full attention may have fewer and larger KV heads and use its keys as values; some sizes have experts beside the MLP.
Files may store keys and values for the layers that share others'; the model takes nothing from them.
Source: transformers ``models/{gemma4,gemma4_unified,diffusion_gemma}/{modeling,configuration}_*.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tpshard.axes import Heads, Units
from tpshard.blocks.dense import decoder, expert_channels, experts, gated_mlp, layer_inputs, norms
from tpshard.config import Config
from tpshard.table import UNUSED, Table

FAMILY = "gemma4"
_TEXT = {"vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
         "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}  # fmt: skip
USUAL = {
    "gemma4_text": {**_TEXT, "vocab_size_per_layer_input": 262_144, "hidden_size_per_layer_input": 256},
    "gemma4_unified_text": {**_TEXT, "hidden_size_per_layer_input": 0},
    "diffusion_gemma_text": {**_TEXT, "hidden_size_per_layer_input": 0, "enable_moe_block": True,
                             "attention_k_eq_v": True},
}  # fmt: skip
MODEL_TYPES = tuple(USUAL)
FULL, SLIDING = "full_attention", "sliding_attention"


def table(c: Config) -> Table:
    c = c.with_usual(**USUAL[c.model_type])
    hidden, layers, layer = c.count("hidden_size"), c.count("num_hidden_layers"), "@layers.{layer}"
    own = frozenset(range(layers - min(c.number("num_kv_shared_layers"), layers)))
    mixed = c.flag("enable_moe_block", default=False)

    t = decoder(c, experts=c.count("num_experts") if mixed else 0, tied=True,
                prefixes=("model.", "model.language_model.", ""))  # fmt: skip
    for (kv_heads, size, keys_only), of in _attentions(c, layers).items():
        _attention(t, c, f"{layer}.self_attn", kv_heads, size, own.intersection(of), of - own, keys_only)
    for width, of in _widths(c, own, layers).items():
        with t.only(of):
            gated_mlp(t, f"{layer}.mlp", Units(f"ffn_{width}", width, noun="feed-forward channels").each(), hidden)
    norms(t, layer, ("input_layernorm", "post_attention_layernorm"), hidden)
    norms(t, layer, ("pre_feedforward_layernorm", "post_feedforward_layernorm"), hidden)
    t.tensor(f"{layer}.layer_scalar", 1, role="buffer")
    if c.number("hidden_size_per_layer_input"):
        layer_inputs(t, c, layer)
    if mixed:
        count = c.count("num_experts")
        t.linear(f"{layer}.router.proj", count, hidden, role="router")
        t.tensor(f"{layer}.router.scale", hidden, role="router")
        t.tensor(f"{layer}.router.per_expert_scale", count, role="router")
        experts(t, f"{layer}.experts", count, expert_channels(c, "moe_intermediate_size"), hidden)
        t.one_of("experts", "stacked experts")
        for number in ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"):
            t.norm(f"{layer}.{number}", hidden)
    return t


def _attention(
    t: Table,
    c: Config,
    at: str,
    kv_heads: int,
    size: int,
    own: frozenset[int],
    sharing: frozenset[int],
    keys_only: bool,
) -> None:
    """Attention of one kind of layers: with keys and values of their ``own``, or ``sharing`` an earlier layer's."""
    hidden, bias = c.count("hidden_size"), c.flag("attention_bias", default=False)
    heads = Heads(f"heads_over_{kv_heads}", c.count("num_attention_heads"), kv_heads)
    with t.only(own | sharing):
        t.linear(f"{at}.q_proj", heads.query(size), hidden, role="q", bias=bias)
        t.linear(f"{at}.o_proj", hidden, heads.query(size), role="o", bias=bias)
        t.norm(f"{at}.q_norm", size)
    for of, unused in ((own, False), (sharing, True)):
        with t.only(of):
            for name in "k" if keys_only else "kv":
                t.linear(f"{at}.{name}_proj", heads.kv(size), hidden, role=name, bias=None if unused else bias,
                         optional=unused, note=UNUSED if unused else "")  # fmt: skip
            t.norm(f"{at}.k_norm", size, optional=unused)


def _attentions(c: Config, layers: int) -> Mapping[tuple[int, int, bool], frozenset[int]]:
    """The layers of every kind of attention: KV heads, head size, and whether keys are values as well."""
    by_layer = c.by_layer("per_layer_config")
    if by_layer is None:  # the keys of the first releases
        full = {"head_dim": c.count("global_head_dim", default=512)}
        if c.get("num_global_key_value_heads") is not None and c.flag("attention_k_eq_v", default=False):
            full["num_key_value_heads"] = c.count("num_global_key_value_heads")
        by_layer = {at: full for at, kind in enumerate(_kinds(c, layers)) if kind == FULL}
    found: dict[tuple[int, int, bool], set[int]] = {}
    for at, kind in enumerate(_kinds(c, layers)):
        here = Config({**c.values, **by_layer.get(at, {})})
        keys_only = kind == FULL and c.flag("attention_k_eq_v", default=False)
        found.setdefault((here.count("num_key_value_heads"), here.count("head_dim"), keys_only), set()).add(at)
    return {kind: frozenset(of) for kind, of in found.items()}


def _kinds(c: Config, layers: int) -> Sequence[str]:
    """Every sixth layer is of full attention where the config does not say, and the last always."""
    if c.get("layer_types") is None:
        kinds = [SLIDING if (at + 1) % 6 else FULL for at in range(layers)]
    else:
        kinds = c.listed("layer_types", layers)
    return [*kinds[:-1], FULL]


def _widths(c: Config, own: frozenset[int], layers: int) -> Mapping[int, frozenset[int]]:
    """Layers that share keys may have MLPs twice as wide."""
    width, sharing = c.count("intermediate_size"), frozenset(range(layers)) - own
    if sharing and c.flag("use_double_wide_mlp", default=False):
        return {width: own, 2 * width: sharing}
    return {width: own | sharing}

"""What a tensor *is* in its model, in one word: the roles that tables give and everything else goes by.

Roles stand between families and what is done with their tensors: the verifier takes from them where ranks
exchange tensors, the rules of the level *plan* which tensors meet, and engine layouts what to rename. A
bias has its matrix's role with ``_bias``. A new role serves at least two families.
"""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """Tensors of one axis that meet inside a layer: what ``ins`` make, ``outs`` take, unit by unit.

    ``ins`` are column-parallel, ``outs`` row-parallel (their outputs are summed over ranks), ``each`` hold
    one or a few values a unit, ``inner`` are row-parallel inside the part: what they make is summed over
    ranks too, and goes back into the part.
    """

    name: str
    ins: frozenset[str]
    outs: frozenset[str]
    each: frozenset[str] = frozenset()
    inner: frozenset[str] = frozenset()

    @property
    def roles(self) -> frozenset[str]:
        return self.ins | self.outs | self.each | self.inner


def _part(name: str, ins: str, outs: str, each: str = "", inner: str = "") -> Part:
    return Part(name, *(frozenset(words.split()) for words in (ins, outs, each, inner)))


PARTS = (
    # q_gate: queries, with a gate beside each head's. qkv_gate: a fused matrix with a gate among its blocks.
    # q_b, kv_b: from a latent to the heads. attn_gate: what the heads' outputs are multiplied with.
    # o_group: from a group of heads to its latent, which o takes (DeepSeek-V4's output matrix in two steps).
    # attn_head: values of single heads (slopes, scales, tables with a column a head). attn_mix: mixes heads.
    _part("attention", "q q_gate k v kv qkv qkv_gate q_b kv_b attn_gate o_group", "o", "sinks attn_head", "attn_mix"),
    _part("feed-forward", "gate up gate_up", "down", "ffn_channel"),
    _part("experts", "expert_gate expert_up expert_gate_up", "expert_down"),
    _part("shared experts", "shared_gate shared_up shared_gate_up", "shared_down"),
    # Mamba 1 and 2. ssm_x: from the channels to dt, B and C, a sum inside the mixer; ssm_dt: from dt to channels.
    _part("state space", "ssm_in ssm_conv ssm_dt", "ssm_out", "ssm_head", "ssm_x"),
    # Everything that runs along a sequence with a state a head: delta nets, RWKV, xLSTM, RG-LRU, lightning,
    # and the short convolutions of LFM2.
    _part("linear attention", "linear_in linear_conv", "linear_out", "linear_head"),
    # What leads from a tower to the language model: one matrix to its channels, or a gate and up; one back.
    _part("projector", "projector_in", "projector_out"),
    # A pair of small matrices beside a layer's large ones: LAuReL, per-layer inputs, language adapters.
    _part("low rank", "low_in", "low_out"),
)

EMBED = frozenset({"embed"})  # cut along the vocabulary, looked up with ids masked, summed over ranks
HEAD = frozenset({"head"})  # cut along the vocabulary, gathered
PREDICTION = frozenset({"prediction_head", "prediction_embed"})  # copies for prediction layers
VOCABULARY = EMBED | HEAD | PREDICTION

ROW = EMBED.union(*(part.outs | part.inner for part in PARTS))
COLUMN = frozenset[str]().union(*(part.ins | part.each for part in PARTS))
EXPERTS = frozenset({"expert_down", "expert_gate", "expert_up", "expert_gate_up"})

WHOLE = frozenset(
    {
        "position",
        "router",
        "shared_router",
        "q_a",
        "kv_a",
        "embed_projection",
        "head_projection",
        "prediction_projection",
        "pooler",
        "vision",
        "audio",
        "buffer",
        "gathered",  # cut, and what it makes is put together at once (NEEDS_GATHER)
        "inside",  # numbers that all units of a part share, used inside what is cut (an activation's)
        "whole",  # with a note that says why
    }
)
"""Roles of tensors that every rank holds whole."""

INSIDE = frozenset({"inside"})  # whole, and yet what their module gives is a rank's own share

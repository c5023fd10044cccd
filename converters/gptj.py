"""GPT-J and CodeGen: attention and MLP side by side after one norm, no biases in attention, one on the head.

CodeGen's ``qkv_proj`` is in four blocks, as many as the parts its trainer cut the model into, and each holds
the *queries, values, keys* of its heads.
Source: transformers ``models/{gptj,codegen}/modeling_*.py`` (``mp_num = 4``).
"""

from __future__ import annotations

from functools import reduce
from operator import add

from tpshard.axes import Dim, Heads, Padded, Units
from tpshard.blocks.dense import attention, mlp
from tpshard.config import Config
from tpshard.errors import UnsupportedError
from tpshard.table import Table

FAMILY = "gptj"
MODEL_TYPES = ("codegen", "gptj")
_BLOCKS = 4


def table(c: Config) -> Table:
    hidden, count = c.count("n_embd", "hidden_size"), c.count("n_head", "num_attention_heads")
    size = c.head_dim(count)
    ffn = Units("ffn", c.count("n_inner", default=4 * hidden), noun="feed-forward channels").each()
    vocab = Padded("vocab", c.count("vocab_size")).each()

    t = Table(c.count("n_layer", "num_hidden_layers"), prefixes=("transformer.", ""))
    t.embedding("@wte", vocab, hidden)
    layer = "@h.{layer}"
    if c.model_type == "codegen":
        units = Units("heads", count, noun="attention heads")
        t.linear(f"{layer}.attn.qkv_proj", _blocks(units, size), hidden, role="qkv")
        t.linear(f"{layer}.attn.out_proj", hidden, units.each(size), role="o")
    else:
        heads = Heads("heads", count, count)
        attention(
            t, f"{layer}.attn", heads.query(size), heads.kv(size), hidden,
            names=("q_proj", "k_proj", "v_proj", "out_proj"),
        )  # fmt: skip
    mlp(t, f"{layer}.mlp", ffn, hidden, names=("fc_in", "fc_out"))
    t.norm(f"{layer}.ln_1", hidden, bias=True)
    for mask in ("bias", "causal_mask"):  # which releases before 2023 saved
        t.tensor(f"{layer}.attn.{mask}", 1, 1, None, None, role="buffer", optional=True)
    t.tensor(f"{layer}.attn.masked_bias", role="buffer", optional=True)
    t.norm("@ln_f", hidden, bias=True)
    tied = c.flag("tie_word_embeddings", default=False)
    t.head("lm_head", vocab, hidden, tied_to="@wte.weight" if tied else None, bias=True)
    return t


def _blocks(heads: Units, size: int) -> Dim:
    """``[block][q v k][heads of the block][size]``."""
    if heads.count % _BLOCKS:
        raise UnsupportedError(
            f"{heads.count} attention heads do not divide into CodeGen's {_BLOCKS} blocks; "
            "correct 'n_head' in config.json"
        )
    each = heads.count // _BLOCKS
    runs = [heads.run(start, start + each, size) for start in range(0, heads.count, each) for _ in "qvk"]
    return reduce(add, runs)

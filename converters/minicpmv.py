"""MiniCPM-V 4.6, 4.7 and MiniCPM-OCR: a SigLIP tower that joins its patches halfway, and joins them again at the end.

Halfway stands attention inside windows, then two matrices on the patches of a window. The language model is Qwen3.5's.
Source: transformers ``models/{minicpmv4_6,minicpmv4_7,minicpm_ocr}/modeling_*.py``.
"""

from __future__ import annotations

from tpshard.axes import Heads
from tpshard.blocks.composite import MODEL, include_language, include_tower, input_norm, language_config, projector
from tpshard.blocks.dense import attention
from tpshard.config import Config
from tpshard.registry import part_of
from tpshard.table import Table

FAMILY = "minicpmv"
MODEL_TYPES = ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7")


def table(c: Config) -> Table:
    text = language_config(c, "text_config", model_type="qwen3_5_text", tied=c.model_type == "minicpm_ocr")
    tower = part_of(c, "vision_config", model_type=f"{c.model_type}_vision")
    width, times = tower.count("hidden_size"), c.count("merger_times", default=1)

    t = Table(0, prefixes=MODEL)
    include_language(t, text)
    include_tower(t, tower, "vision_tower")
    _window_merger(t, tower, width)
    for number in range(times):  # each joins four patches; the last leads to the language model
        at = f"@merger.mlp.{number}"
        input_norm(t, f"{at}.pre_norm", 4 * width)
        projector(t, at, 4 * width, 4 * width, text.count("hidden_size") if number == times - 1 else width)
    return t


def _window_merger(t: Table, c: Config, width: int) -> None:
    at, count = "@vision_tower.vit_merger", c.count("num_attention_heads")
    heads, size = Heads("merger_heads", count, count, or_whole=True), c.head_dim(count)
    attention(
        t, f"{at}.self_attn", heads.query(size), heads.kv(size), width, bias=True, out_bias=True,
        names=("q_proj", "k_proj", "v_proj", "out_proj"),
    )  # fmt: skip
    t.whole(f"{at}.layer_norm1.weight", width, why="a norm of what goes into the attention")
    t.whole(f"{at}.layer_norm1.bias", width, why="a norm of what goes into the attention")
    rows, columns = (Config({"n": n}).count("n") for n in c.listed("window_kernel_size", 2))
    joined = rows * columns
    input_norm(t, f"{at}.pre_norm", joined * width)
    channels = joined * c.count("intermediate_size")
    projector(t, at, joined * width, channels, width, axis="merger_channels")

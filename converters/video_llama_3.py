"""VideoLLaMA 3, PaddleOCR-VL and DeepSeek-VL: SigLIP towers, two matrices, a language model, names of their own.

Source: transformers ``models/{video_llama_3,paddleocr_vl,deepseek_vl}/modeling_*.py``, ``conversion_mapping.py``.
"""

from __future__ import annotations

from tpshard.blocks.composite import MODEL, include_language, include_tower, input_norm, language_config, projector
from tpshard.config import Config
from tpshard.registry import part_of
from tpshard.table import Table

FAMILY = "video_llama_3"
MODEL_TYPES = ("deepseek_vl", "paddleocr_vl", "video_llama_3")
PARTS = {  # the language model's and the tower's model types where the config does not say
    "deepseek_vl": ("llama", "siglip_vision_model"),
    "paddleocr_vl": ("paddleocr_vl_text", "paddleocr_vl_vision"),
    "video_llama_3": ("qwen2", "video_llama_3_vision"),
}


def table(c: Config) -> Table:
    language, vision = PARTS[c.model_type]
    paddle = c.model_type == "paddleocr_vl"
    text = language_config(c, "text_config", model_type=language, tied=c.model_type != "video_llama_3")
    released = c.nested("vision_config", model_type=vision).values
    named = {**released, "model_type": vision} if released["model_type"] in (c.model_type, "siglip") else released
    tower = part_of(Config({"vision_config": named}), "vision_config", model_type=vision)
    hidden, width = text.count("hidden_size"), tower.count("hidden_size")

    t = Table(0, prefixes=("mlp_AR", "model.projector", "projector") if paddle else MODEL)
    include_language(t, text)
    include_tower(t, tower, "visual" if paddle else "vision_model")
    if paddle:
        joined = tower.count("spatial_merge_size", default=2) ** 2 * width
        input_norm(t, "@.pre_norm", width)
        projector(t, "@", joined, joined, hidden)
    elif c.model_type == "deepseek_vl":
        projector(t, "@aligner", width, hidden, hidden, names=("linear1", "linear2"))
    else:
        projector(t, "@projector", width, hidden, hidden, names=("readout.0", "readout.2"))
    return t

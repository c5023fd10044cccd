"""VibeVoice: tokenizers of sound, a Qwen2, and a small head that makes sound by diffusion; and the model that listens.

A tokenizer is convolutions with feed-forwards between, which widen as steps get fewer: the feed-forwards are cut, the
convolutions stay whole. Source: transformers ``models/{vibevoice,vibevoice_asr,vibevoice_acoustic_tokenizer}``.
"""

from __future__ import annotations

from collections.abc import Sequence

from tpshard.axes import Units
from tpshard.blocks.composite import MODEL, include_language, language_config
from tpshard.blocks.dense import channels_of, gated_mlp, mlp
from tpshard.blocks.speech import WAVE
from tpshard.config import Config
from tpshard.errors import DamagedError
from tpshard.registry import part_of, table_of
from tpshard.table import Table

FAMILY = "vibevoice"
_TOKENIZER = {"channels": 1, "hidden_size": 64, "num_filters": 32, "kernel_size": 7, "ffn_expansion": 4,
              "depths": [3, 3, 3, 3, 3, 3, 8], "downsampling_ratios": [2, 2, 4, 5, 5, 8]}  # fmt: skip
USUAL = {
    "vibevoice_acoustic_tokenizer": _TOKENIZER,
    "vibevoice_acoustic_tokenizer_decoder": _TOKENIZER,
    "vibevoice_acoustic_tokenizer_encoder": _TOKENIZER,
}
MODEL_TYPES = ("vibevoice", "vibevoice_asr", *USUAL)
HEAD = {"hidden_size": 1536, "latent_size": 64, "num_hidden_layers": 4, "intermediate_size": 4608,
        "frequency_embedding_size": 256}  # fmt: skip
BETWEEN = "a norm of all that the first matrix makes lies between the two"
CONDITION = "what it makes of the condition scales all channels"


def table(c: Config) -> Table:
    if c.model_type in USUAL:
        return _tokenizer(c)
    listens = c.model_type == "vibevoice_asr"
    text = language_config(c, "text_config", model_type="qwen2")
    t = Table(0, prefixes=MODEL)
    include_language(t, text)
    parts = {"acoustic_tokenizer_encoder": "acoustic_tokenizer_encoder_config",
             "semantic_tokenizer_encoder": "semantic_tokenizer_encoder_config"} if listens else {
             "audio_tower": "audio_config", "semantic_tokenizer_encoder": "semantic_model_config"}  # fmt: skip
    for at, key in parts.items():
        kind = "vibevoice_acoustic_tokenizer" + ("_encoder" if at.endswith("_encoder") else "")
        part = table_of(part_of(c, key, model_type=kind))
        t.include(part, *((f"{o}{at}.", f"{o}{at}.") for o in MODEL), axes=f"{at}_", or_whole=True)
    t.whole_module("@multi_modal_projector", why=BETWEEN)
    if not listens:
        t.whole_module("@semantic_connector", why=BETWEEN)
        for name in ("latent_bias_factor", "latent_scaling_factor"):
            t.tensor(f"@{name}", role="buffer", optional=True)
        head = c.with_usual(diffusion_head_config={}).nested("diffusion_head_config", **HEAD)
        t.include(_diffusion(head), *(f"{o}diffusion_head." for o in MODEL), axes="diffusion_", or_whole=True)
    return t


def _tokenizer(c: Config) -> Table:
    t = Table(0)
    kind = c.model_type
    if kind != "vibevoice_acoustic_tokenizer":
        _stages(t, c, "@", encodes=kind.endswith("_encoder"))
    else:
        _stages(t, c, "@encoder.", encodes=True)
        _stages(t, c, "@decoder.", encodes=False)
    return t


def _stages(t: Table, c: Config, at: str, *, encodes: bool) -> None:
    """Stages of blocks, each of a convolution along time and a feed-forward; a convolution leads to the next."""
    ratios, kernel = _numbers(c, "downsampling_ratios"), c.count("kernel_size")
    widths, depths = [c.count("num_filters") << stage for stage in range(len(ratios) + 1)], _numbers(c, "depths")
    if not encodes:
        widths, ratios = widths[::-1], ratios[::-1]
        depths = list(c.layer_numbers("decoder_depths", default=depths[::-1]))
    if len(depths) != len(widths):
        raise DamagedError(f"config.json: {len(depths)} 'depths' for {len(widths)} stages; correct it")
    first, last = c.count("channels"), c.count("hidden_size")
    if not encodes:
        first, last = last, first
    _whole(t, f"{at}stem.conv.conv", widths[0], (widths[0], first, kernel))
    for stage, width in enumerate(widths):
        place = f"{at}stem" if not stage else f"{at}conv_layers.{stage - 1}"
        if stage:
            into, size = widths[stage - 1], 2 * ratios[stage - 1]
            shape = (width, into, size) if encodes else (into, width, size)
            _whole(t, f"{place}.{'conv.conv' if encodes else 'convtr.convtr'}", width, shape)
        for block in range(depths[stage]):
            _block(t, c, f"{place}.stage.{block}", width, f"{'' if encodes else 'decoder_'}ffn{width}", kernel)
    _whole(t, f"{at}head.conv", last, (last, widths[-1], kernel))


def _block(t: Table, c: Config, at: str, width: int, axis: str, kernel: int) -> None:
    _whole(t, f"{at}.mixer.conv", width, (width, 1, kernel))
    ffn = Units(axis, c.count("ffn_expansion") * width, noun="feed-forward channels").each()
    mlp(t, f"{at}.ffn", ffn, width, names=("linear1", "linear2"))
    for name in ("norm", "ffn_norm"):
        t.norm(f"{at}.{name}", width)
    for name in ("gamma", "ffn_gamma"):
        t.whole(f"{at}.{name}", width, why="a weight for every channel, after the sum")


def _whole(t: Table, name: str, out: int, shape: Sequence[int]) -> None:
    t.whole(f"{name}.weight", *shape, why=WAVE)
    t.whole(f"{name}.bias", out, why=WAVE)


def _numbers(c: Config, name: str) -> list[int]:
    return list(c.layer_numbers(name))


def _diffusion(c: Config) -> Table:
    """Layers whose feed-forward's input and output the condition scales, channel by channel."""
    hidden, latent, layer = c.count("hidden_size"), c.count("latent_size"), "@layers.{layer}"
    t = Table(c.count("num_hidden_layers"))
    for name, out, into in (("noisy_images_proj", hidden, latent), ("cond_proj", hidden, hidden),
                            ("timestep_proj.fc1", hidden, c.count("frequency_embedding_size")),
                            ("timestep_proj.fc2", hidden, hidden), ("final_layer.linear_1", 2 * hidden, hidden),
                            ("final_layer.linear_2", latent, hidden)):  # fmt: skip
        t.whole(f"@{name}.weight", out, into, why=CONDITION)
    t.whole(f"{layer}.linear.weight", 3 * hidden, hidden, why=CONDITION)
    t.norm(f"{layer}.norm", hidden)
    gated_mlp(t, f"{layer}.ffn", channels_of(c), hidden, bias=c.flag("mlp_bias", default=False))
    return t

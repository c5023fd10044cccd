"""What speech encoders share: heads as wide as the model, conformers, heads that write text.

The convolutions at their input stay whole: every channel of one sees all of the last, at every step of a wave, and
they are small beside the layers.
"""

from __future__ import annotations

from tpshard.axes import Dim, Heads, Padded, Units
from tpshard.config import Config
from tpshard.errors import DamagedError
from tpshard.table import ADDED_ONCE, Table

from .dense import attention, mlp, norms
from .mixers import convolution

DENSE = ("intermediate_dense", "output_dense")
WAVE = "convolutions over the wave, every channel of which sees all of the one before"
INTO = "it takes all that the convolutions give"
PLACES = "a convolution over groups of channels, for positions; its weights are normed over all of them"
AFTER = "a small module behind the encoder"


def encoder_heads(c: Config, *keys: str, width: int) -> tuple[Heads, int]:
    """The heads that the first of ``keys`` counts, together as wide as ``width``, and the size of one."""
    count = c.count(*(keys or ("num_attention_heads",)))
    if width % count:
        raise DamagedError(f"config.json: {count} attention heads do not divide the width {width}; correct the counts")
    return Heads("heads", count, count), width // count


def encoder_channels(c: Config, *keys: str) -> Units:
    """The feed-forward channels that the first of ``keys`` counts."""
    return Units("ffn", c.count(*(keys or ("intermediate_size",))), noun="feed-forward channels")


def encoder_attention(
    t: Table, at: str, heads: Heads, size: int, hidden: int, *, names: tuple[str, str, str, str], bias: bool = True
) -> None:
    """Attention among all positions, with or without biases."""
    attention(t, at, heads.query(size), heads.kv(size), hidden, bias=bias, out_bias=bias, names=names)


def conformer_layer(
    t: Table, layer: str, heads: Heads, size: int, ffn: Units, hidden: int, kernel: int, *, causal: bool = False
) -> None:
    """A conformer's two halves of a feed-forward and the convolution between, as fairseq names them.

    The convolution is cut by channels: ``pointwise_conv1 [value; gate]``, the depthwise one, ``pointwise_conv2``. With
    ``causal`` a norm over all channels follows the depthwise one, else a batch norm, channel by channel.

    Source: arXiv 2005.08100; transformers ``models/wav2vec2_conformer``, ``models/wav2vec2_bert``.
    """
    for half in ("ffn1", "ffn2"):
        t.norm(f"{layer}.{half}_layer_norm", hidden, bias=True)
        mlp(t, f"{layer}.{half}", ffn.each(), hidden, names=DENSE)
    names = ("linear_q", "linear_k", "linear_v", "linear_out")
    encoder_attention(t, f"{layer}.self_attn", heads, size, hidden, names=names)
    norms(t, layer, ("self_attn_layer_norm", "final_layer_norm"), hidden, bias=True)
    norm_inside(t, f"{layer}.conv_module.layer_norm", hidden)
    conformer_convolution(t, f"{layer}.conv_module", hidden, kernel, norm="depthwise_layer_norm" if causal else None)


def conformer_convolution(
    t: Table, at: str, hidden: int, kernel: int, *, norm: str | None = None, batch_norm: str = "batch_norm",
    bias: bool = False,
) -> None:  # fmt: skip
    """The convolution of a conformer layer, cut by channels; ``norm`` is one over all of them, else a batch norm."""
    channels = Units("conv_channels", hidden, noun="convolution channels").each()
    pointwise(t, f"{at}.pointwise_conv1", channels * 2, hidden, role="linear_in", bias=bias)
    pointwise(t, f"{at}.pointwise_conv2", hidden, channels, role="linear_out", bias=bias)
    convolution(t, f"{at}.depthwise_conv", channels, kernel, bias=bias)
    if norm is not None:
        t.norm(f"{at}.{norm}", channels, bias=True)
        return
    for part in ("weight", "bias", "running_mean", "running_var"):
        t.tensor(f"{at}.{batch_norm}.{part}", channels, role="linear_head")
    t.tensor(f"{at}.{batch_norm}.num_batches_tracked", role="buffer", optional=True)


def norm_inside(t: Table, name: str, width: int) -> None:
    """A norm of what goes into a module, inside it: whole, though what the module's matrices make is cut."""
    for part in ("weight", "bias"):
        t.whole(f"{name}.{part}", width, why="a norm of what goes into the module")


def pointwise(t: Table, name: str, out: Dim | int, into: Dim | int, *, role: str, bias: bool) -> None:
    """A matrix that is stored as a convolution of width one, ``weight [out, in, 1]``, and its ``bias``."""
    t.tensor(f"{name}.weight", out, into, 1, role=role)
    if bias:
        once = isinstance(into, Dim) and not isinstance(out, Dim)
        t.tensor(f"{name}.bias", out, role=f"{role}_bias", note=ADDED_ONCE if once else "")


def ctc_head(t: Table, c: Config, width: int, name: str = "lm_head") -> None:
    """The head of a model that was trained to write text, which encoders alone lack."""
    if c.get("vocab_size") is None:
        return
    vocab = Padded("vocab", c.count("vocab_size")).each()
    with t.stack(optional=True):
        t.linear(name, vocab, width, role="head", bias=True)


def wave_convolutions(t: Table, mels: int, hidden: int) -> None:
    """Whisper's two convolutions, from the bins of a spectrogram to the encoder's width."""
    for name, into in (("conv1", mels), ("conv2", hidden)):
        t.whole(f"@{name}.weight", hidden, into, 3, why=WAVE)
        t.whole(f"@{name}.bias", hidden, why=WAVE)


def whisper_encoder(c: Config) -> Table:
    """Whisper's encoder as a tower by itself: two convolutions, stored positions, keys without a bias.

    Source: transformers ``models/whisper/modeling_whisper.py`` (``WhisperEncoder``).
    """
    hidden = c.count("hidden_size", "d_model")
    heads, size = encoder_heads(c, "num_attention_heads", "encoder_attention_heads", width=hidden)
    q, kv = heads.query(size), heads.kv(size)

    t = Table(c.count("num_hidden_layers", "encoder_layers"))
    wave_convolutions(t, c.count("num_mel_bins"), hidden)
    t.embedding("@embed_positions", c.count("max_source_positions"), hidden, role="position")
    layer = "@layers.{layer}"
    t.linear(f"{layer}.self_attn.q_proj", q, hidden, role="q", bias=True)
    t.linear(f"{layer}.self_attn.k_proj", kv, hidden, role="k")
    t.linear(f"{layer}.self_attn.v_proj", kv, hidden, role="v", bias=True)
    t.linear(f"{layer}.self_attn.out_proj", hidden, q, role="o", bias=True)
    mlp(t, layer, encoder_channels(c, "intermediate_size", "encoder_ffn_dim").each(), hidden)
    norms(t, layer, ("self_attn_layer_norm", "final_layer_norm"), hidden, bias=True)
    t.norm("@layer_norm", hidden, bias=True)
    return t

"""What a model's forward takes besides token ids, worked out from its signature, its config and its modules.

Every argument is made for whole rows of the batch. Nothing here knows a model: shapes come from the numbers
that transformers' configs have for them (``image_size``, ``num_mel_bins``, ``hidden_size``).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from tpshard.errors import UnsupportedError

from .assisting import from_assisted
from .media import PLACEHOLDERS, count_of, image_tokens, images, sounds, tiled_images, videos
from .skeleton import Skeleton

CROSS = re.compile(r"cross|encoder_attn|encdec|encoder_decoder_attention", re.IGNORECASE)
"""Names that modules have in transformers which attend to what an encoder made."""

_STATES = 11  # vectors that a decoder without an encoder of its own attends to


class Rows(Protocol):
    """Content for the rows of a batch."""

    @property
    def rows(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    def ids(self, vocabulary: int, name: str = "ids") -> torch.Tensor:
        """Token ids ``[rows, tokens]``."""
        ...

    def values(self, name: str, *shape: int) -> torch.Tensor:
        """Gaussian numbers ``[rows, *shape]``."""
        ...


def takes(model: Any) -> Mapping[str, inspect.Parameter]:
    """The arguments of the model's forward by name; of one that hands on whatever it gets, those of what it extends."""
    wanted = inspect.signature(model.forward).parameters
    classes: tuple[Any, ...] = type(model).__mro__
    for cls in classes:
        if not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in wanted.values()):
            break
        if "forward" in vars(cls):
            wanted = inspect.signature(cls.forward).parameters
    return wanted


def tables_of(model: Any) -> list[nn.Module]:
    """The embeddings that the model's input ids go to: one, or one for every codebook; none where it says none."""
    try:
        table = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return []
    if isinstance(table, nn.ModuleList):
        return list(table)
    return [] if table is None or getattr(table, "weight", None) is None else [table]


def rows_of(skeleton: Skeleton, table: nn.Module) -> int:
    """Rows of an embedding in the model, which on a rank of its own shapes are not those that it has there."""
    path = next(path for path, module in skeleton.modules.items() if module is table)
    return int(skeleton.parameters[f"{path}.weight"].shape[0])


def vocabulary_of(skeleton: Skeleton) -> int:
    """How many token ids the model takes; 0 for one that takes none."""
    tables = tables_of(skeleton.model)
    if tables:
        return min(rows_of(skeleton, table) for table in tables)
    return count_of(skeleton.model.config.get_text_config(), "vocab_size")


def decoder_vocabulary(skeleton: Skeleton) -> int:
    """How many ids the decoder takes, where that is a model of its own."""
    get = getattr(skeleton.model, "get_decoder", None)
    decoder = get() if get is not None else None
    tables = tables_of(decoder) if decoder is not None and hasattr(decoder, "get_input_embeddings") else []
    known = [t for t in tables if any(module is t for module in skeleton.modules.values())]
    if known:
        return min(rows_of(skeleton, table) for table in known)
    return count_of(getattr(skeleton.model.config, "decoder", None), "vocab_size") or vocabulary_of(skeleton)


def encoder_states(skeleton: Skeleton, rows: Rows) -> dict[str, Any]:
    """Vectors for a decoder's cross attention, where the model has some and no encoder that makes them."""
    wanted = takes(skeleton.model)
    names = ("encoder_hidden_states", "encoder_outputs", "cross_attention_states")
    argument = next((name for name in names if name in wanted), None)
    own = {"decoder_input_ids", "decoder_inputs_embeds", "pixel_values", "input_features"} & wanted.keys()
    crossing = any(CROSS.search(name) for name in skeleton.recipes)
    if argument is None or own or not crossing:
        return {}
    config = skeleton.model.config.get_text_config()
    keys = ("cross_attention_hidden_size", "encoder_hidden_size", "hidden_size", "d_model")
    width = next((n for key in keys if (n := count_of(config, key))), 0)
    states = rows.values("encoder_hidden_states", _STATES, width)
    return {argument: (states,) if argument == "encoder_outputs" else states}


def arguments_of(skeleton: Skeleton, rows: Rows, *, pictured: bool = True) -> dict[str, Any]:
    """Everything that the model's forward needs, positions left to the model.

    A mask is given where positions may be: a row with gaps in its positions is taken for several without one.

    Raises:
        UnsupportedError: it takes neither token ids nor anything else that is known here.
    """
    model, wanted = skeleton.model, takes(skeleton.model)
    config, main = model.config, getattr(model, "main_input_name", "input_ids")
    main = "input_ids" if main == "inputs" and "input_ids" in wanted else main  # of whatever kind, ids by their name
    inputs: dict[str, Any] = {}
    if main == "input_ids" and "input_ids" in wanted and vocabulary_of(skeleton):
        inputs["input_ids"] = _token_ids(skeleton, rows)
        inputs |= _pictured(skeleton, rows, inputs["input_ids"]) if pictured else {}
        if {"attention_mask", "position_ids"} <= wanted.keys():
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if hasattr(model, "logit_scale") or hasattr(model, "temperature"):
            inputs |= images(config, wanted, rows)  # compares texts with images, and runs on neither alone
        if "image_attention_mask" in wanted:
            inputs |= _images_beside(config, wanted, rows)
        if pictured and "aspect_ratio_ids" in wanted:
            inputs |= tiled_images(config, rows)
    elif main == "pixel_values" or main == "flattened_patches":
        inputs |= _text_beside(skeleton, wanted, rows)
        placed = "image_embeds_position_mask" in wanted
        inputs |= _placed_images(config, wanted, rows) if placed else images(config, wanted, rows)
    elif main == "pixel_values_videos":
        inputs |= videos(config, rows)
    else:
        inputs |= sounds(config, wanted, model, rows)
    if "decoder_input_ids" in wanted and decoder_vocabulary(skeleton):
        inputs["decoder_input_ids"] = _decoder_ids(skeleton, rows)
    inputs |= encoder_states(skeleton, rows) | _beside(wanted, rows) | from_assisted(config, wanted, rows)
    if main not in inputs and not inputs.keys() & {"input_ids", "input_values", "input_features", "pixel_values"}:
        raise UnsupportedError(
            f"{type(model).__name__} takes {main}, and config.json has no number that says of what size; "
            "verify by bytes and plan"
        )
    if "use_cache" in wanted:
        inputs["use_cache"] = False
    return inputs


def _text_beside(skeleton: Skeleton, wanted: Mapping[str, Any], rows: Rows) -> dict[str, torch.Tensor]:
    """Token ids for a decoder that takes images first; where a Q-Former reads the text as well, ids for it."""
    config, out = skeleton.model.config, {}
    if "input_ids" in wanted and not getattr(config, "is_encoder_decoder", False) and vocabulary_of(skeleton):
        ids = _token_ids(skeleton, rows)
        token, queries = _placeholder(config), count_of(config, "num_query_tokens")
        if token is not None:
            ids[ids == token] = token - 1 if token else 1
            ids[:, :queries] = token
        out["input_ids"] = ids
    if "qformer_input_ids" in wanted:
        out["qformer_input_ids"] = rows.ids(count_of(config.qformer_config, "vocab_size"), "ids for the Q-Former")
    return out


def _placed_images(config: Any, wanted: Mapping[str, Any], rows: Rows) -> dict[str, torch.Tensor]:
    """An image for every row, and which tokens are the image's (KOSMOS); vectors alone where the text is too short."""
    count, width = count_of(config, "latent_query_num"), count_of(config.get_text_config(), "hidden_size", "embed_dim")
    if 0 < count < rows.tokens:
        out = images(config, wanted, rows)
    else:
        count = max(1, rows.tokens // 3)
        out = {"image_embeds": rows.values("vectors of an image", count, width)}
    mask = torch.zeros(rows.rows, rows.tokens, dtype=torch.long)
    mask[:, rows.tokens - count :] = 1
    return {**out, "image_embeds_position_mask": mask}


def _images_beside(config: Any, wanted: Mapping[str, Any], rows: Rows) -> dict[str, torch.Tensor]:
    """An image for every row, which all of its tokens look at (IDEFICS); images are in a dimension of their own."""
    pixels = images(config, wanted, rows)
    if not pixels:
        return {}
    seen = torch.ones(rows.rows, rows.tokens, 1, dtype=torch.long)
    return {"pixel_values": pixels["pixel_values"][:, None], "image_attention_mask": seen}


def _decoder_ids(skeleton: Skeleton, rows: Rows) -> torch.Tensor:
    """Ids ``[rows, tokens]`` for the decoder, or ``[rows, tokens, channels]`` where a token has some (Dia's codes).

    None is padding: a model that masks it by itself would have nothing to attend to from a first one.
    """
    config = skeleton.model.config
    decoder = getattr(config, "decoder_config", None)
    channels = count_of(decoder, "num_channels")
    if channels:
        vocabulary = count_of(decoder, "vocab_size")
        return torch.stack([rows.ids(vocabulary, f"decoder ids of channel {n}") for n in range(channels)], -1)
    ids = rows.ids(decoder_vocabulary(skeleton), "decoder ids")
    padding = getattr(config.get_text_config(decoder=True), "pad_token_id", None)
    return ids if padding is None else torch.where(ids == padding, padding + 1, ids)


def _beside(wanted: Mapping[str, Any], rows: Rows) -> dict[str, torch.Tensor]:
    """What some models take beside token ids: places on a page, tokens that attend to all others."""
    out: dict[str, torch.Tensor] = {}
    if "bbox" in wanted:
        corners = rows.values("places", rows.tokens, 4).abs().fmod(0.5)
        corners[..., 2:] += corners[..., :2]  # right and below of the first corner
        out["bbox"] = corners.clamp(0, 1)
    if "global_attention_mask" in wanted:
        mask = torch.zeros(rows.rows, rows.tokens, dtype=torch.long)
        mask[:, ::4] = 1
        out["global_attention_mask"] = mask
    return out


def pictures(skeleton: Skeleton) -> int:
    """Tokens of a text that one image takes, where the model reads images among text and that can be told; else 0."""
    model = skeleton.model
    wanted = takes(model)
    if not {"input_ids", "pixel_values"} <= wanted.keys() or _placeholder(model.config) is None:
        return 0
    return image_tokens(model, images(model.config, wanted, _One()))


class _One:
    """A row whose content does not matter."""

    rows = tokens = 1

    def values(self, name: str, *shape: int) -> torch.Tensor:
        return torch.empty(1, *shape, device="meta")


def _placeholder(config: Any) -> int | None:
    return next((v for key in PLACEHOLDERS if isinstance(v := getattr(config, key, None), int)), None)


def _pictured(skeleton: Skeleton, rows: Rows, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """An image for every row, if there is room for its tokens; ``ids`` then begin with their placeholders."""
    model, token = skeleton.model, _placeholder(skeleton.model.config)
    if token is None:
        return {}
    ids[ids == token] = token - 1 if token else 1
    count = pictures(skeleton)
    if not count or count >= rows.tokens:
        return {}
    ids[:, :count] = token
    return images(model.config, takes(model), rows)


def in_dtype(value: Any, compute: torch.dtype) -> Any:
    """An argument with its floating-point tensors in the dtype of the computation."""
    if isinstance(value, tuple):
        return tuple(in_dtype(part, compute) for part in value)
    if isinstance(value, dict):
        return {key: in_dtype(part, compute) for key, part in value.items()}
    return value.to(compute) if torch.is_tensor(value) and value.is_floating_point() else value


def _token_ids(skeleton: Skeleton, rows: Rows) -> torch.Tensor:
    """Ids ``[rows, tokens]``; of a model with an embedding for each codebook ``[rows * codebooks, tokens]``."""
    books = len(tables_of(skeleton.model))
    vocabulary = vocabulary_of(skeleton)
    if books <= 1:
        return rows.ids(vocabulary)
    return torch.stack([rows.ids(vocabulary, f"ids of codebook {n}") for n in range(books)], 1).flatten(0, 1)

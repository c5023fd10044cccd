"""Images and sounds for a model's forward: noise in the shapes that its config gives them.

Patches that come flattened (``image_grid_thw``) and whole images (``pixel_values [rows, channels, height, width]``),
log-mel frames (``input_features``) and waves (``input_values``); and how many tokens of a text stand for one image.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

CHANNELS = ("num_channels", "in_channels", "in_chans")
MELS = (
    "num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "feature_size", "input_feat_size",
    "n_mel_bins", "input_dim", "num_mel_channels",
)  # fmt: skip
PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_index")
_WAVE = 3200  # samples: more than the convolutions of wav2vec 2.0 need for a few frames
_FRAMES = 64
_PARTS = ("vision_config", "audio_config", "encoder_config", "speech_config", "encoder")


def part_of(config: Any, keys: tuple[str, ...]) -> Any:
    """The part of a config that has one of these numbers: a tower's, else the model's own."""
    held = [getattr(config, name, None) for name in _PARTS]
    parts = [part for part in held if part is not None and not isinstance(part, dict)]
    return next((part for part in [*parts, config] if any(count_of(part, key) for key in keys)), None)


def count_of(config: Any, *keys: str) -> int:
    """The first of these numbers that a config has; 0 for none."""
    values = (getattr(config, key, None) for key in keys)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), 0)


def pair_of(config: Any, key: str) -> tuple[int, int]:
    """Height and width, given as one number or two; (0, 0) where the config has none."""
    value = getattr(config, key, None)
    if isinstance(value, int):
        return value, value
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, int) for v in value):
        return int(value[-2] if len(value) > 1 else value[0]), int(value[-1])
    return 0, 0


def images(config: Any, takes: Mapping[str, Any], rows: Any) -> dict[str, torch.Tensor]:
    """``pixel_values`` for every row, and their grid where patches come flattened; empty where sizes are not known."""
    vision = getattr(config, "vision_config", None) or getattr(config, "encoder", None) or config
    channels = count_of(vision, *CHANNELS) or 3
    if "flattened_patches" in takes:
        return _flat_patches(count_of(vision, "patch_embed_hidden_size"), rows)
    if "image_grid_thw" in takes:
        patch, merge = count_of(vision, "patch_size"), count_of(vision, "spatial_merge_size") or 2
        if not patch:
            return {}
        patches, width = 4 * merge * merge, channels * (count_of(vision, "temporal_patch_size") or 1) * patch * patch
        pixels = rows.values("image", patches, width).flatten(0, 1)
        grid = torch.tensor([[1, 2 * merge, 2 * merge]]).repeat(rows.rows, 1)
        return {"pixel_values": pixels, "image_grid_thw": grid}
    if "spatial_shapes" in takes:
        return _padded_patches(vision, channels, rows)
    height, width = pair_of(vision, "image_size")
    if not height:
        return {}
    frames = count_of(vision, "num_frames") if getattr(vision, "tubelet_size", None) is not None else 0
    if count_of(config, "video_token_index") and "pixel_values_videos" not in takes:
        frames = 1  # what it takes for images are videos (InstructBLIP's sibling): the shortest
    images_of = (frames, channels, height, width) if frames else (channels, height, width)
    out = {"pixel_values": rows.values("image", *images_of)}
    if "noise" in takes and (patch := count_of(vision, "patch_size")):  # says which patches are hidden
        out["noise"] = rows.values("noise", (height // patch) * (width // patch))
    return out


def tiled_images(config: Any, rows: Any) -> dict[str, torch.Tensor]:
    """One image for every row in as many tiles as there may be, which all tokens look at (Llama 3.2 Vision).

    ``pixel_values [rows, 1, tiles, channels, height, width]``; an aspect ratio's id is its place from 1.
    """
    vision = getattr(config, "vision_config", None)
    tiles, (height, width) = count_of(vision, "max_num_tiles"), pair_of(vision, "image_size")
    ratios = getattr(vision, "supported_aspect_ratios", None) or []
    fitting = [place for place, ratio in enumerate(ratios, start=1) if ratio[0] * ratio[1] == tiles]
    if not tiles or not height or not fitting:
        return {}
    return {
        "pixel_values": rows.values("image", 1, tiles, count_of(vision, *CHANNELS) or 3, height, width),
        "aspect_ratio_ids": torch.full((rows.rows, 1), fitting[-1]),
        "aspect_ratio_mask": torch.ones(rows.rows, 1, tiles, dtype=torch.long),
        "cross_attention_mask": torch.ones(rows.rows, rows.tokens, 1, tiles, dtype=torch.long),
    }


def videos(config: Any, rows: Any) -> dict[str, torch.Tensor]:
    """``pixel_values_videos [rows, frames, channels, height, width]`` of as few frames as make a patch."""
    vision = getattr(config, "vision_config", None) or config
    side, frames = count_of(vision, "crop_size", "image_size"), count_of(vision, "tubelet_size", "temporal_patch_size")
    channels = count_of(vision, *CHANNELS) or 3
    return {"pixel_values_videos": rows.values("video", frames or 1, channels, side, side)} if side else {}


def _padded_patches(vision: Any, channels: int, rows: Any) -> dict[str, torch.Tensor]:
    """Patches of an image of four by four, and how it was cut (SigLIP 2)."""
    patch = count_of(vision, "patch_size")
    return {
        "pixel_values": rows.values("image", 16, channels * patch * patch),
        "pixel_attention_mask": torch.ones(rows.rows, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4]]).repeat(rows.rows, 1),
    }


def _flat_patches(width: int, rows: Any) -> dict[str, torch.Tensor]:
    """Pix2Struct's patches ``[rows, patches, 2 + width]``, each after its row and column from 1."""
    patches = rows.values("image", 12, 2 + width)
    place = torch.arange(12)
    patches[..., 0], patches[..., 1] = place // 4 + 1, place % 4 + 1
    return {"flattened_patches": patches} if width else {}


def sounds(config: Any, takes: Mapping[str, Any], model: Any, rows: Any) -> dict[str, torch.Tensor]:
    """``input_features`` (frames of mel bins, in the model's order) or ``input_values`` for every row.

    The latter is a wave, or a spectrogram.
    """
    part = part_of(config, MELS)
    bins = count_of(part, *MELS)
    if "input_features" in takes and bins:
        most = count_of(part, "max_source_positions")
        if _bins_first(model, bins):
            return {"input_features": rows.values("sound", bins, 2 * most if most else _FRAMES)}
        return {"input_features": rows.values("sound", _FRAMES, bins)}
    if "input_values" in takes:
        bins, longest = count_of(config, *MELS), count_of(config, "max_length")
        if bins and longest and not any(isinstance(m, torch.nn.Conv1d) for m in model.modules()):
            return {"input_values": rows.values("sound", longest, bins)}  # a spectrogram, in patches
        channels = count_of(config, "audio_channels")  # of a codec, which takes them in a dimension of their own
        return {"input_values": rows.values("sound", *([channels] if channels else []), _WAVE)}
    return {}


def _bins_first(model: Any, bins: int) -> bool:
    """Whether features come as ``[bins, frames]``, as Whisper's do: their first module is a convolution over them."""
    for module in model.modules():
        if isinstance(module, torch.nn.Conv1d):
            # Speech2Text turns frames before it convolves them; its class around the convolutions says so.
            return module.in_channels == bins and not any(
                "Subsampler" in type(around).__name__ and module in list(around.modules()) for around in model.modules()
            )
    return False


def image_tokens(model: Any, inputs: Mapping[str, torch.Tensor]) -> int:
    """How many tokens of a text one image takes; 0 where that cannot be told.

    Where patches come flattened it is a number of the grid; else the model's own ``get_image_features`` is run on
    the meta device, where nothing is computed but shapes.
    """
    if "image_grid_thw" in inputs:
        vision = getattr(model.config, "vision_config", model.config)
        return int(inputs["image_grid_thw"][0].prod()) // (count_of(vision, "spatial_merge_size") or 2) ** 2
    find = getattr(model, "get_image_features", None)
    hidden = count_of(model.config.get_text_config(), "hidden_size")
    if find is None or not hidden or "pixel_values" not in inputs:
        return 0
    pixels = inputs["pixel_values"]
    compute = next(p.dtype for p in model.parameters() if p.is_floating_point())
    try:
        with torch.no_grad():
            found = find(pixel_values=torch.empty((1, *pixels.shape[1:]), device="meta", dtype=compute))
    except Exception:  # whatever a tower makes of tensors without values
        return 0
    found = getattr(found, "pooler_output", found)
    tensors = found if isinstance(found, (list, tuple)) else [found]
    elements = sum(int(t.numel()) for t in tensors if torch.is_tensor(t))
    return elements // hidden

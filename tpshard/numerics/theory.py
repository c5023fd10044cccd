"""How many collectives a tensor-parallel run of a model has to take."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from tpshard.manifest import Manifest, Note

from .arguments import CROSS
from .points import Point, base_role
from .skeleton import Skeleton


def theoretical(skeleton: Skeleton, manifest: Manifest, points: Mapping[str, Point]) -> dict[str, int]:
    """Collectives of one pass by kind: forward exactly, backward at most.

    A block that is cut takes one sum at its end, and one of gradients at its beginning (Megatron-LM's f and g):
    two a layer, each way. Besides: one for the embedding forward, one to gather the head and one for its
    gradient; with latent attention one more for the gradient of the shared latents, with experts one for that
    of the routing weights; and one each way for every tensor that a norm over cut channels takes. Blocks
    that share their input (shared experts, a parallel feed-forward) may share the sum of its gradient.
    """
    sums = gathers = entries = norms = 0
    homes = _homes(skeleton)
    for path, point in points.items():
        module = skeleton.modules[path]
        if point.fallback:
            continue
        if point.kind == "gather":
            gathers += 1
            entries += 1
        elif point.kind == "needs_sum":
            norms += 2 if "Gated" in type(module).__name__ else 1
        elif point.kind == "sum" and path not in homes:
            sums += 1
            entries += 0 if isinstance(module, nn.Embedding) else 1 + point.experts
            entries += CROSS.search(path) is not None  # what the encoder made is an input of its own
    entries += sum(base_role(note) == "kv_a" and name.endswith(".weight") for name, note in _used(skeleton, manifest))
    return {
        key: count
        for key, count in {
            "forward all_reduce": sums + norms, "forward all_gather": gathers, "backward all_reduce": entries + norms,
        }.items()
        if count
    }  # fmt: skip


def _homes(skeleton: Skeleton) -> set[str]:
    """Embeddings that are not looked up but hold what encoder's and decoder's, which lie deeper, are tied to."""
    by_weight: dict[int, list[str]] = {}
    for path, module in skeleton.modules.items():
        if isinstance(module, nn.Embedding) and path:
            by_weight.setdefault(id(skeleton.parameters[f"{path}.weight"]), []).append(path)
    homes = set()
    for paths in by_weight.values():
        depths = sorted(path.count(".") for path in paths)
        homes |= {path for path in paths if len(paths) > 1 and path.count(".") == depths[0] < depths[1]}
    return homes


def _used(skeleton: Skeleton, manifest: Manifest) -> list[tuple[str, Note]]:
    names = {name for recipe in skeleton.recipes.values() for name, _ in recipe.tensors}
    return [(name, manifest.notes[name]) for name in sorted(names)]

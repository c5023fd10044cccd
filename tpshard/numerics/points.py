"""Where ranks and reference meet: decided from what tensors *are* (their roles), never from how they were cut.

A plan that left a row-parallel matrix whole on every rank must show as a sum that is too large, so the
cut may not say whether there is a sum. The kinds of points:

* ``sum``: the output of a module that holds a row-parallel tensor, or of the vocabulary's embedding;
* ``gather``: the output of the head, cut along the vocabulary, and of any matrix whose table says that what
  comes next sees all of it;
* ``needs_sum``: the *input* of a norm that spans what is cut; its ranks' parts are put together first;
* ``replicated``: the output of a module whose tensors are whole on every rank: no collective, but every
  rank's output is compared with the reference's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from tpshard.manifest import Manifest, Note
from tpshard.roles import COLUMN, EMBED, EXPERTS, HEAD, INSIDE, PREDICTION, ROW
from tpshard.table import ADDED_ONCE, NEEDS_GATHER, NEEDS_SUM, NORMED_BY, PASSES_ON

from .skeleton import Skeleton


@dataclass(frozen=True)
class Point:
    """A module at which the participants meet.

    ``tensor`` is the tensor on disk whose first dimension says which outputs a rank holds (``gather``)
    or, the last, which inputs (``needs_sum``); "" for other kinds. ``operand`` is the module's own parameter
    whose product is summed, where that is not its output (see :mod:`.operands`). ``passing`` are parameters of
    experts beside which others pass their input on (see :mod:`.passing`). A ``fallback`` is a point only where none
    below it was passed: a head that multiplies with its children's matrices itself. ``repeats``: whether ranks may
    bring copies to a gather, of KV heads that they share; of anything else each index is on one rank.
    """

    path: str
    kind: str
    tensor: str = ""
    experts: bool = False
    operand: str = ""
    passing: tuple[str, ...] = ()
    fallback: bool = False
    repeats: bool = False

    @property
    def block(self) -> str:
        """The block that a reader would look at: the module around."""
        return self.path.rpartition(".")[0] or self.path


def met_as(manifest: Manifest, name: str) -> Note:
    """The note of a tensor, or that of one that is whole where the degree leaves its axes uncut."""
    return Note("whole") if manifest.is_held_whole(name) else manifest.notes[name]


def base_role(note: Note) -> str:
    """The role of the matrix that a tensor belongs to."""
    return note.role.removesuffix("_bias")


def points_of(skeleton: Skeleton, manifest: Manifest) -> dict[str, Point]:
    """The points of a model by module path."""
    model = skeleton.model
    outputs = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    found: dict[str, Point] = {}
    for path, module in skeleton.modules.items():
        if isinstance(skeleton.modules.get(path.rpartition(".")[0]), nn.MultiheadAttention):
            continue  # torch's own attention takes the tensors of its output matrix and does not call it
        within = ("out_proj.weight", "out_proj.bias") if isinstance(module, nn.MultiheadAttention) else ()
        names = [
            name
            for key in (*module._parameters, *module._buffers, *within)
            if (recipe := skeleton.recipe_of(f"{path}.{key}" if path else key)) is not None
            for name, _ in recipe.tensors
        ]
        if not names:
            continue
        leaf = next(module.children(), None) is None
        notes = [met_as(manifest, name) for name in names]
        roles = {base_role(note) for note in notes}
        looked_up = isinstance(module, nn.Embedding)  # as the model uses it: a tied tensor is a table and a head
        multiplied = leaf and (roles & HEAD or (roles & EMBED and isinstance(module, nn.Linear)))
        if not looked_up and (module is outputs or multiplied):
            weight = skeleton.recipe_of(f"{path}.weight")
            found[path] = Point(path, "gather", weight.tensors[0][0] if weight else names[0])
        elif roles & ROW or (looked_up and roles & HEAD):
            operand, passing = _operand(skeleton, manifest, path), _passing(skeleton, manifest, path)
            found[path] = Point(path, "sum", experts=bool(roles & EXPERTS), operand=operand, passing=passing)
            for name, note in zip(names, notes, strict=True):
                if note.text.startswith(NORMED_BY):  # a norm without weights stands before, beside this module
                    before = f"{path.rpartition('.')[0]}.{note.text.removeprefix(NORMED_BY)}"
                    found[before] = Point(before, "needs_sum", name)
        elif any(note.text == NEEDS_GATHER for note in notes):
            marked = next(name for name, note in zip(names, notes, strict=True) if note.text == NEEDS_GATHER)
            found[path] = Point(path, "gather", marked, repeats=_is_shared(manifest, marked))
        elif any(note.text == NEEDS_SUM for note in notes):
            marked = next(name for name, note in zip(names, notes, strict=True) if note.text == NEEDS_SUM)
            found[path] = Point(path, "needs_sum", marked)
        elif roles & HEAD and not leaf:
            found[path] = Point(path, "gather", names[0], fallback=True)
        elif not roles & (COLUMN | PREDICTION | HEAD | INSIDE) and roles != {"buffer"} and leaf:
            found[path] = Point(path, "replicated")
    return found


def _is_shared(manifest: Manifest, name: str) -> bool:
    """Whether a tensor's rows are along units of which several ranks may need one: KV heads, fewer than the ranks."""
    segments = manifest.dims[name][0].segments
    return any(s.axis is not None and s.axis.views()[s.view] < max(s.axis.views().values()) for s in segments)


def _operand(skeleton: Skeleton, manifest: Manifest, path: str) -> str:
    """The row-parallel parameter of a module that goes on with its product: there are modules with tensors below it."""
    module = skeleton.modules[path]
    if not any(below._parameters for child in module.children() for below in child.modules()):
        return ""
    for key in module._parameters:
        recipe = skeleton.recipe_of(f"{path}.{key}" if path else key)
        if recipe is not None and any(manifest.notes[name].role in ROW - EXPERTS for name, _ in recipe.tensors):
            return str(key)
    return ""


def _passing(skeleton: Skeleton, manifest: Manifest, path: str) -> tuple[str, ...]:
    """The module's own row-parallel parameters that are marked as standing beside experts that pass their input on."""
    found = []
    for key in skeleton.modules[path]._parameters:
        recipe = skeleton.recipe_of(f"{path}.{key}" if path else key)
        if recipe is not None and any(met_as(manifest, name).text == PASSES_ON for name, _ in recipe.tensors):
            found.append(key)
    return tuple(found)


def added_once(manifest: Manifest) -> frozenset[str]:
    """Row-parallel biases: whole on every rank, added after the sum, so only one rank's counts in it."""
    return frozenset(
        name
        for name, note in manifest.notes.items()
        if not manifest.is_held_whole(name)
        and (
            note.text == ADDED_ONCE
            or (note.role.endswith("_bias") and base_role(note) in ROW and not any(d.axes for d in manifest.dims[name]))
        )
    )


def replicated(notes: Mapping[str, Note], once: Iterable[str]) -> frozenset[str]:
    """Tensors that every rank must hold exactly as the source has them."""
    partial = ROW | COLUMN | HEAD | PREDICTION

    def norm_of(name: str) -> Note | None:
        return notes.get(name.removesuffix(".bias") + ".weight")

    return frozenset(once) | {
        name
        for name, note in notes.items()
        if base_role(note) not in partial
        and note.text != NEEDS_SUM
        and not (note.role == "norm_bias" and (weight := norm_of(name)) is not None and weight.text == NEEDS_SUM)
    }

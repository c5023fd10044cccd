"""Names whose layers are numbered from 0 in every stage, and experts in every group, as the checkpoint numbers them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from tpshard.errors import DamagedError
from tpshard.intervals import Bounds, dealt


def global_names(
    held: Iterable[tuple[Mapping[str, int], Mapping[str, str]]], numbers: re.Pattern[str], layers: int, experts: int
) -> tuple[tuple[Bounds, ...], dict[str, str]]:
    """The layers of every stage, and the dtypes of all tensors by their names with the checkpoint's numbers.

    Args:
        held: of every file its place (``pp``, ``ep``) and the dtypes of its tensors by name.
        numbers: matches names that have numbers, with the group ``layer`` and others of experts' numbers.
        layers: how many the model has; and ``experts``, in a layer.

    Raises:
        DamagedError: the stages have not as many layers together, or a number is not one of its group.
    """
    files = [(place, names) for place, names in held]
    counts: dict[int, int] = {}
    for place, names in files:
        own = [int(found["layer"]) for name in names if (found := numbers.fullmatch(name)) is not None]
        counts[place["pp"]] = max(counts.get(place["pp"], 0), max(own, default=-1) + 1)
    if sorted(counts) != list(range(len(counts))):
        raise DamagedError(f"the files are of the pipeline stages {sorted(counts)}; some are missing")
    sizes = [counts[stage] for stage in range(len(counts))]
    if sum(sizes) != layers:
        raise DamagedError(
            f"the stages hold {' + '.join(map(str, sizes))} layers, where config.json promises {layers}; files are "
            "missing, or of another model"
        )
    bounds = tuple((sum(sizes[:stage]), sum(sizes[: stage + 1])) for stage in range(len(sizes)))
    groups = dealt(experts, max((place["ep"] for place, _ in files), default=0) + 1)
    return bounds, {
        _renumbered(name, numbers, bounds[place["pp"]][0], groups[place["ep"]]): dtype
        for place, names in files for name, dtype in names.items()
    }  # fmt: skip


def _renumbered(name: str, numbers: re.Pattern[str], first_layer: int, group: Sequence[int]) -> str:
    found = numbers.fullmatch(name)
    if found is None:
        return name
    renamed = name
    for of in sorted(numbers.groupindex, key=found.start, reverse=True):  # from the back, so that places stay
        text = found[of]
        if text is None:
            continue
        if of != "layer" and int(text) >= group[1] - group[0]:
            raise DamagedError(f"{name} is of expert {text} where a group has {group[1] - group[0]}")
        number = int(text) + (first_layer if of == "layer" else group[0])
        renamed = f"{renamed[: found.start(of)]}{number}{renamed[found.end(of) :]}"
    return renamed

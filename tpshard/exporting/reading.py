"""Reads an engine's directory back: the same arrangement, held against the files that are there.

A table's module may have ``PATTERN``, which its files' paths match, with the groups ``tp``, ``pp``, ``ep`` (numbers of
the rank, counted from ``FIRST``, 0 where it is not said) and ``tp_size``, ``pp_size``, ``ep_size`` where names tell it;
where names have one number, the group ``rank``, ``place_of(number, config)`` tells its place by the config beside them.
``CONTAINER`` is the files' format, ``WITHIN`` the key under which they hold tensors, ``IGNORED`` matches names of
tensors that are no weights. Where layers or experts are numbered from 0 in every stage or group, ``NUMBERS`` matches
their names with the group ``layer`` and others of experts. ``PP_OR_EP``: a name with one number more may mean either.
Files that say themselves what they hold have ``origins_of``: see :mod:`.rectangles`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import ModuleType

from tpshard.config import Config
from tpshard.errors import DamagedError, StorageError, TpshardError, UnsupportedError, UsageError
from tpshard.header import WeightsFile
from tpshard.intervals import Bounds
from tpshard.listing import list_directory, shown
from tpshard.matching import match
from tpshard.opened import Stamp, open_weights, require_unchanged
from tpshard.planning import Placed
from tpshard.registry import family_of, table_for
from tpshard.source import natural_key

from .arrange import Arranged, arrange
from .chunked import arrange_chunks
from .dcpreading import open_distcp
from .enginetable import DISTCP, EngineTable
from .expected import Candidate, candidates, held, named, provisional
from .files import LAYOUT, RANK, place_found
from .given import Given, read_config, without_weights
from .grid import Grid, Rank
from .localnames import global_names
from .options import engine_and_version
from .parts import Model, architecture_of, model_of
from .rectangles import place_rectangles, rectangles_of, spelt_as, spelt_as_in_checkpoints, without_copies
from .registry import engines


@dataclass(frozen=True)
class _Found:
    """The weights of a directory, by rank."""

    files: tuple[WeightsFile, ...]
    stamps: tuple[Stamp, ...]
    places: tuple[Mapping[str, int], ...]  # tp, pp, ep of each file

    def size(self, of: str) -> int:
        return max(place[of] for place in self.places) + 1


def looks_like(path: str | os.PathLike[str]) -> list[ModuleType]:
    """The engines whose files a directory may hold, by the names alone."""
    root = Path(path)
    if not root.is_dir():
        return []
    names = list(list_directory(root).sizes)
    return [module for module in engines().values() if _matching(module, names)]


def open_engine(
    path: str | os.PathLike[str], engine: str | None = None, *, config: str | os.PathLike[str] | None = None
) -> Given:
    """Open an engine's directory as the checkpoint that it was made of.

    ``engine`` names it where the files' names may be several engines'; ``config`` is a directory with the model's
    config.json, where there is none beside the files.

    Raises:
        UsageError: it holds no engine's files.
        UnsupportedError: the model or the engine's version is not known.
        DamagedError: files are missing, of another degree or version, or not of the model of config.json.
        StorageError: they cannot be read.
    """
    root = Path(path)
    values = read_config(Path(config) if config is not None else root)
    if engine is not None:
        module, version = engine_and_version(engine)
        return _opened(root, module, version if "@" in engine else None, values)
    modules = looks_like(root)
    if not modules:
        raise UsageError(f"{shown(root)} holds no files of an engine that is known ('tpshard list engines')")
    problems: list[tuple[str, TpshardError]] = []
    for module in modules:
        try:
            return _opened(root, module, None, values)
        except StorageError:
            raise
        except TpshardError as error:
            problems.append((module.ENGINE, error))
    if len(problems) == 1:
        raise problems[0][1]
    told = "; ".join(f"as {name}: {error}" for name, error in problems)
    raise DamagedError(f"{shown(root)} is no whole directory of an engine: {told}; name the engine to read it as")


def _opened(root: Path, module: ModuleType, version: str | None, values: Mapping[str, object]) -> Given:
    """As one engine's, by the first of its versions that fits."""
    container = getattr(module, "CONTAINER", "")
    found = _weights(root, module) if container != DISTCP else _Found((), (), ())
    if hasattr(module, "origins_of"):
        return _as_described(root, module, values, found)
    problem: TpshardError | None = None
    for known in module.VERSIONS:
        if version not in (None, known.name):
            continue
        for one, ep_inside in product(_meant(module, found), (False, True)):
            try:
                if container == DISTCP:
                    metadata = _named_files(root, module)[0][0]
                    return open_distcp(root, module, metadata, known.name, dict(values))
                return _as(root, module, known.name, dict(values), one, ep_inside)
            except StorageError:
                raise
            except TpshardError as error:
                problem = problem or error
    assert problem is not None
    raise problem


def _meant(module: ModuleType, found: _Found) -> list[_Found]:
    """What the files' names may mean: where a table says ``PP_OR_EP``, a lone number may be a group of experts."""
    if not getattr(module, "PP_OR_EP", False) or not found.places or found.size("pp") == 1 or found.size("ep") > 1:
        return [found]
    return [found, replace(found, places=tuple({**place, "pp": 0, "ep": place["pp"]} for place in found.places))]


def _as_described(root: Path, module: ModuleType, values: Mapping[str, object], found: _Found) -> Given:
    """As what the files say of themselves."""
    config, family, table = Config(values), family_of(values), table_for(values)
    placed = place_rectangles([(f, p["tp"]) for f, p in zip(found.files, found.places, strict=True)], module)
    try:
        tied = match(table, placed.layout.tensors.values()).tied
    except UnsupportedError:  # names that checkpoints do not have
        placed = spelt_as_in_checkpoints(placed, module.renamed(architecture_of(config)))
        tied = match(table, placed.layout.tensors.values()).tied
    placed = without_copies(placed, tied)
    tensors = tuple(placed.layout.tensors.values())
    model = model_of(config, family, table, tensors, match(table, tensors))
    ranks = placed.layout.size

    def holding(other: Model) -> Placed:
        grid = Grid(ranks, ((0, other.layers),))
        of_engine = module.table(other, module.VERSIONS[0].name)
        return spelt_as(placed, arrange_chunks(other, of_engine, grid, module.ENGINE, rectangles_of(placed)))

    given = _given(root, model, placed, found, ranks)
    return replace(given, holding=holding, what=f"{module.ENGINE} files of {ranks} ranks")


def _given(
    root: Path, model: Model, placed: Placed, found: _Found, tp_size: int, not_carried: Sequence[str] = (),
    left_out: Sequence[str] = (),
) -> Given:  # fmt: skip
    weights = {file.name for file in found.files}
    sides = {name: size for name, size in list_directory(root).sizes.items() if name not in weights}
    for name in not_carried:
        sides.pop(name, None)
    sides, strange = without_weights(sides)
    left_out = [*left_out, *strange]

    def check_unchanged() -> None:
        require_unchanged(root, [file.name for file in found.files], found.stamps)

    return Given(
        model, placed, root, [root / file.name for file in found.files], sides, left_out, (), check_unchanged, tp_size
    )


def _as(
    root: Path, module: ModuleType, version: str, values: dict[str, object], found: _Found, whole_experts: bool
) -> Given:
    """As one version's; ``whole_experts``: the tensor-parallel ranks hold whole experts."""
    engine: str = module.ENGINE
    config, family, table = Config(values), family_of(values), table_for(values)
    possible = candidates(table, family)
    guess = provisional(table, possible)
    model = model_of(config, family, table, [c.tensor for c in possible], guess)
    of_engine: EngineTable = module.table(model, version)
    tp_size = found.size("tp")
    ep_size = tp_size if whole_experts and of_engine.ep_inside else found.size("ep")
    if of_engine.whole_experts:
        ep_size = tp_size
    if whole_experts and (ep_size == 1 or not model.experts or not of_engine.ep_inside):
        raise UnsupportedError(f"{shown(root)}: {engine} has no whole experts to deal here")
    numbers: re.Pattern[str] | None = getattr(module, "NUMBERS", None)
    if numbers is None:
        stages, names = _stages(model, of_engine, engine, possible, found)
    else:
        dtypes = [{info.name: info.dtype for info in file.tensors} for file in found.files]
        stages, names = global_names(zip(found.places, dtypes, strict=True), numbers, model.layers, model.experts)
    grid = Grid(tp_size, stages, ep_size, of_engine.ep_inside)
    tensors = held(model, of_engine, engine, possible, names)
    model = model_of(config, family, table, tensors, match(table, tensors))
    arranged = arrange(model, of_engine, grid, engine)
    order = {rank: number for number, rank in enumerate(grid.ranks)}
    ranks = []
    for place in found.places:
        rank = next((n for r, n in order.items() if (r.tp, r.pp) == (place["tp"], place["pp"])
                     and (of_engine.ep_inside or r.ep == place["ep"])), None)  # fmt: skip
        if rank is None:
            lacks = f"which the {len(order)} ranks do not have"
            raise DamagedError(f"{shown(root)}: a file is of {Rank(**place)}, {lacks}; remove it")
        ranks.append(rank)
    _require_own_places(root, found.files, ranks)
    missing = set(range(len(grid.ranks))) - set(ranks)
    if missing:
        raise DamagedError(
            f"{shown(root)}: the files of {len(missing)} of {len(grid.ranks)} ranks are missing "
            f"(such as {grid.ranks[min(missing)]}); copy them again"
        )

    def holding(other: Model) -> Placed:
        arranged = arrange(other, module.table(other, version), grid, engine)
        placed = place_found(arranged, list(zip(found.files, ranks, strict=True)), engine)
        _check_constants(root, arranged, found, ranks, engine)
        return placed

    placed = holding(model)
    absent = f"the layout of {engine} does without it: {next(iter(arranged.dropped.values()), '')}"
    left_out = [f"{name} ({absent})" for name in arranged.dropped]
    given = _given(root, model, placed, found, tp_size, tuple(of_engine.sides(model, grid)), left_out)
    return replace(given, holding=holding, what=f"{engine} {version} files, {grid}")


def _require_own_places(root: Path, files: Sequence[WeightsFile], ranks: Sequence[int]) -> None:
    """Raise DamagedError where files that tpshard wrote stand in each other's places, or are of several exports."""
    layouts: dict[str, str] = {}
    for file, rank in zip(files, ranks, strict=True):
        told = file.metadata.get(RANK)
        if told is not None and told != str(rank):
            raise DamagedError(
                f"{shown(root / file.name)} was written for rank {told:.20}, and its name is that of rank {rank}: "
                "exchanged or copied over; bring every file back under its own name"
            )
        layouts.setdefault(file.metadata.get(LAYOUT, ""), file.name)
    layouts.pop("", None)
    if len(layouts) > 1:
        one, other, *_ = layouts.values()
        raise DamagedError(
            f"{shown(root)}: {one} and {other} are of two exports; remove the files of one, or export again"
        )


def _check_constants(root: Path, arranged: Arranged, found: _Found, ranks: Sequence[int], engine: str) -> None:
    """Constants are there with their values: no checkpoint has a tensor that could hold another."""
    wanted = {(fixed.name, rank): fixed for fixed in arranged.fixed for rank in fixed.ranks}
    for file, rank in zip(found.files, ranks, strict=True):
        for info in file.tensors:
            fixed = wanted.pop((info.name, rank), None)
            if fixed is None:
                continue
            with (root / file.name).open("rb") as stream:
                stream.seek(info.offset)
                data = stream.read(len(fixed.data))
            if (info.dtype, info.shape, data) != (fixed.dtype, fixed.shape, fixed.data):
                raise DamagedError(
                    f"{file.name} holds {info.name} as {info.dtype} {list(info.shape)} {data.hex()} where {engine} has "
                    f"the constant {fixed.dtype} {list(fixed.shape)} {fixed.data.hex()} for a model like this; a "
                    "checkpoint has no place for another value"
                )
    if wanted:
        (name, rank), *_ = wanted
        lacks = f"{name} is missing from the files of rank {rank}"
        raise DamagedError(f"{lacks}, without which {engine} does not load them; export again")


def _stages(
    model: Model, table: EngineTable, engine: str, possible: list[Candidate], found: _Found
) -> tuple[tuple[Bounds, ...], dict[str, str]]:
    """The layers of every stage by the names in its files, and all names with layers numbered as in the checkpoint."""
    by_stage: dict[int, dict[str, str]] = {}
    for file, place in zip(found.files, found.places, strict=True):
        by_stage.setdefault(place["pp"], {}).update({info.name: info.dtype for info in file.tensors})
    if len(by_stage) == 1 or sorted(by_stage) != list(range(len(by_stage))):
        if len(by_stage) > 1:
            raise DamagedError(f"the files are of the pipeline stages {sorted(by_stage)}; some are missing")
        return ((0, model.layers),), {name: dtype for names in by_stage.values() for name, dtype in names.items()}
    layers: list[set[int]] = [set() for _ in by_stage]
    every = named(model, table, engine, possible)
    layered = {one.name: one.part.layer for one in every if one.part.layer is not None}
    for stage, names in by_stage.items():
        layers[stage] = {layered[name] for name in names if name in layered}
    bounds: list[Bounds] = []
    at = 0
    for stage, own in enumerate(layers):
        count = len({layer for layer in own if layer < model.layers})
        if table.local_layers and own != set(range(len(own))):
            raise DamagedError(f"stage {stage} holds the layers {sorted(own)[:8]}, which are not counted from 0")
        if not table.local_layers and {layer for layer in own if layer < model.layers} != set(range(at, at + count)):
            raise DamagedError(f"stage {stage} holds the layers {sorted(own)[:8]}..., where {at} should be its first")
        bounds.append((at, at + count))
        at += count
    if at != model.layers:
        raise DamagedError(f"the stages hold {at} layers together, where config.json promises {model.layers}")
    if not table.local_layers:
        return tuple(bounds), {name: dtype for names in by_stage.values() for name, dtype in names.items()}
    together: dict[str, str] = {}
    for stage, names in by_stage.items():
        first = bounds[stage][0]
        for name, dtype in names.items():
            together[_moved(name, layered.get(name), first)] = dtype
    return tuple(bounds), together


def _moved(name: str, layer: int | None, by: int) -> str:
    """A name whose layer has a number that is larger by so many."""
    if layer is None or not by:
        return name
    parts = name.split(".")
    parts[parts.index(str(layer))] = str(layer + by)
    return ".".join(parts)


def _named_files(root: Path, module: ModuleType) -> list[tuple[str, dict[str, str]]]:
    """The engine's files in a directory by their names, with what those say."""
    matched = _matching(module, sorted(list_directory(root).sizes, key=natural_key))
    if not matched:
        raise UsageError(
            f"{shown(root)} holds no file named as {module.ENGINE} names them; name the engine that wrote it with "
            "--from ('tpshard list engines'), or leave --from out"
        )
    return matched


def _weights(root: Path, module: ModuleType) -> _Found:
    """The headers of the engine's files in a directory."""
    matched = _named_files(root, module)
    first = getattr(module, "FIRST", 0)
    ignored: re.Pattern[str] | None = getattr(module, "IGNORED", None)
    files, stamps, places = [], [], []
    for name, groups in matched:
        container, within = getattr(module, "CONTAINER", "safetensors"), getattr(module, "WITHIN", None)
        file, stamp = open_weights(root, name, container, within)
        if ignored is not None:
            kept = tuple(info for info in file.tensors if ignored.fullmatch(info.name) is None)
            file = replace(file, tensors=kept)
        files.append(file)
        stamps.append(stamp)
        if hasattr(module, "place_of"):
            places.append(module.place_of(int(groups["rank"]), read_config(root)))
        else:
            places.append({of: int(groups.get(of) or first) - first for of in ("tp", "pp", "ep")})
    for of in ("tp", "pp", "ep"):
        sizes = {int(groups[f"{of}_size"]) for _, groups in matched if groups.get(f"{of}_size")}
        size = max(place[of] for place in places) + 1
        if sizes and sizes != {size}:
            raise DamagedError(
                f"{shown(root)}: by their names the files are of {', '.join(map(str, sorted(sizes)))} ranks, and those "
                f"of {size} are there; copy what is missing, or remove what is of another export"
            )
    return _Found(tuple(files), tuple(stamps), tuple(places))


def _matching(module: ModuleType, names: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    pattern: re.Pattern[str] | None = getattr(module, "PATTERN", None)
    if pattern is None:
        return []
    return [(name, found.groupdict()) for name in names if (found := pattern.fullmatch(name)) is not None]


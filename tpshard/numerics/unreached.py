"""What the original's own run leaves unreached is named with its share; what it reaches, every rank must use.

No run reaches all of every model: a table for training alone, a tower whose input is not known here, taps of a
convolution beyond a short input, rows of a router that is asked for its largest values. Such tensors are compared
by bytes and their cuts by plan. That the ranks leave out something that the original uses is never allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tpshard.manifest import Manifest
from tpshard.planrules import plan_verdict
from tpshard.reports import Finding

from .coverage import Coverage
from .participant import Participant
from .skeleton import Skeleton

MOST_NAMES = 5


def left_out_by_ranks(level: str, participants: Sequence[Participant]) -> list[Finding]:
    """A finding for every tensor that the original's run asked for, and that of a rank with a part of it did not."""
    reference, *ranks = participants
    out = []
    for rank, participant in enumerate(ranks):
        for name in sorted((reference.used - participant.used) & participant.store.parts.keys()):
            message = (
                f"{name}: the original's run uses it, and that of rank {rank}, which holds a part of it, does not; "
                "the config.json of the shards is not the source's"
            )
            out.append(Finding(level, "", name, message))
    return out


def plan_findings(level: str, manifest: Manifest) -> list[Finding]:
    """What the level *plan* finds, said by another level: no run stands for the cuts of what is unreached."""
    return [
        Finding(level, found.file, found.tensor, f"not reached by the run, and by plan: {found.message}")
        for found in plan_verdict(manifest).findings
    ]


def share(coverage: Coverage) -> str:
    """How much was not reached: ``28,591 of 4,342,656 elements of the parameters (0.658%)``."""
    missed, total = sum(coverage.unreached().values()), sum(coverage.sizes.values())
    return f"{missed:,} of {total:,} elements of the parameters ({100 * missed / max(total, 1):.3g}%)"


def unreached_note(coverage: Coverage, skeleton: Skeleton, used: frozenset[str]) -> str:
    """What the original's run left unreached in words, largest first; "" where that is nothing.

    Args:
        used: the tensors on disk that the original's code asked for. Modules none of whose tensors were are named
            as a whole: the code did not run them.
    """
    asked = {
        parameter for parameter, recipe in skeleton.recipes.items() if any(name in used for name, _ in recipe.tensors)
    }
    around = {"", *(module for parameter in asked for module in _modules_around(parameter))}
    not_run: dict[str, int] = {}
    without_effect: dict[str, int] = {}
    for name, missed in coverage.unreached().items():
        parameter = name.partition("[")[0]
        if parameter in asked:
            without_effect[parameter] = without_effect.get(parameter, 0) + missed
        else:
            outermost = next((m for m in _modules_around(parameter) if m not in around), parameter)
            not_run[outermost] = not_run.get(outermost, 0) + missed
    if not not_run and not without_effect:
        return ""
    kinds = [
        f"{kind} {_listed(found)}"
        for kind, found in (("not run:", not_run), ("run, and without effect in part or whole:", without_effect))
        if found
    ]
    return (
        f"the original's own run leaves {share(coverage)} unreached; {'; '.join(kinds)}. These were compared by bytes "
        "and their cuts by plan; --min-coverage makes too many of them a failure"
    )


def _modules_around(parameter: str) -> Iterable[str]:
    """Paths of the modules that a parameter is in, the outermost first; the model itself left out."""
    names = parameter.split(".")[:-1]
    return (".".join(names[:end]) for end in range(1, len(names) + 1))


def _listed(found: dict[str, int]) -> str:
    largest = sorted(found.items(), key=lambda item: -item[1])
    more = f" and {len(largest) - MOST_NAMES} more" if len(largest) > MOST_NAMES else ""
    return ", ".join(f"{name} ({count:,})" for name, count in largest[:MOST_NAMES]) + more

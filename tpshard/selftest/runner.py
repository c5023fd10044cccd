"""Plants every fault in every family that has a place for it, runs good shards beside, and adds up."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import torch
from transformers.utils import logging

from tpshard.errors import UsageError
from tpshard.numerics import require
from tpshard.reports import Fault, SelfTest

from .catalogue import EQUIVALENT, UNSEALED, Mutant, catalogue
from .models import FAMILIES
from .plans import PLANS, PlanFault
from .scratch import NotHereError, forget
from .trial import good_run, plan_wrongly, plant
from .workshop import Workshop

AUTO, ZERO_PAD = "auto", "zero-pad"
SEEDS = (0, 1, 2)
GOOD_QUICK = 12


def selftest(
    families: Sequence[str] | None = None,
    *,
    faults: Sequence[str] | None = None,
    quick: bool = False,
    progress: Callable[[str], None] | None = None,
) -> SelfTest:
    """Prove that the verifier sees faults, and is silent without.

    With ``quick`` every fault is planted once, where it is cheapest, beside a dozen good runs; else in every
    family and degree that has a place for it, beside 200 good runs and more. ``families`` and ``faults`` are
    names; all unless given. ``progress`` is told what was done.

    Raises:
        UsageError: there is no such family or fault, or a fault that was named has no place in the families.
        UnsupportedError: torch or transformers is missing or too old.
    """
    began = time.monotonic()
    chosen = list(families or FAMILIES)
    for family in chosen:
        if family not in FAMILIES:
            raise UsageError(f"the self-test has no family '{family}'; choose among {', '.join(FAMILIES)}")
    for name in faults or ():
        if name not in catalogue() and name not in PLANS:
            known = "\n  ".join([*catalogue(), *PLANS])
            raise UsageError(f"the self-test has no fault '{name}'; choose among:\n  {known}")
    report = SelfTest("selftest", quick=quick, families=chosen, versions=require())
    tell = progress or (lambda text: None)
    with tempfile.TemporaryDirectory(prefix="tpshard-selftest-") as directory, _undisturbed():
        shop = Workshop(Path(directory))
        try:
            _plant_all(report, shop, chosen, faults, quick, tell)
            if faults and report.untried:
                raise UsageError(
                    f"{', '.join(report.untried)}: these families have no place for it ({', '.join(chosen)}); "
                    "leave --family away, or name another fault"
                )
            _run_good(report, shop, chosen, quick, tell)
        finally:
            forget()
    _add_up(report, everything=not faults and chosen == list(FAMILIES))
    report.seconds = time.monotonic() - began
    return report


@contextmanager
def _undisturbed() -> Iterator[None]:
    """One thread, since these matrices are so small that threads only wait, and no word of transformers."""
    threads, verbosity = torch.get_num_threads(), logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _plant_all(
    report: SelfTest,
    shop: Workshop,
    families: Sequence[str],
    faults: Sequence[str] | None,
    quick: bool,
    tell: Callable[[str], None],
) -> None:
    whole = list(families) == list(FAMILIES)
    for fault, places in _faults(families, whole, (AUTO,) if quick else (AUTO, ZERO_PAD)):
        if faults and fault.name not in faults:
            continue
        tried = False
        for family, tp_size, way in places:
            try:
                if isinstance(fault, Mutant):
                    found = plant(fault, shop, family, tp_size, way)
                else:
                    found = plan_wrongly(fault, shop, family, tp_size, way)
            except NotHereError:
                continue
            tried = True
            report.faults.append(found)
            tell(f"{'caught' if found.caught else 'MISSED'} {found.name} ({family}, {tp_size} ranks) {found.note}")
            if quick:
                break
        if not tried:
            report.untried.append(fault.name)


def _faults(
    families: Sequence[str], whole: bool, ways: Sequence[str]
) -> Iterator[tuple[Mutant | PlanFault, Iterable[tuple[str, int, str]]]]:
    """Every fault, and where it may be planted, cheapest first."""
    for mutant in catalogue().values():
        places = [
            (family, tp_size, way)
            for family in families
            for tp_size in FAMILIES[family].degrees
            for way in (ways if mutant.kind != UNSEALED else ways[:1])
            if (not mutant.families or family in mutant.families) and (not mutant.degrees or tp_size in mutant.degrees)
        ]
        yield mutant, places
    for wrong in PLANS.values():
        taken = [family for family in wrong.families if family in families or (whole and family not in FAMILIES)]
        yield wrong, [(f, n, AUTO) for f, n in product(taken, wrong.degrees) if _served(f, n)]


def _served(family: str, tp_size: int) -> bool:
    return family not in FAMILIES or tp_size in FAMILIES[family].degrees


def _run_good(
    report: SelfTest, shop: Workshop, families: Sequence[str], quick: bool, tell: Callable[[str], None]
) -> None:
    for family in families:
        for label, family_, tp_size, seed, made_from in _good(shop, family, quick):
            if made_from:
                shards = shop.resharded(family_, made_from, tp_size, seed)
            else:
                shards = shop.shards(family_, tp_size, seed)
            alarm = good_run(shards, shop.source(family_, seed), AUTO)
            report.good_runs += 1
            if alarm:
                report.alarms.append(f"{label}: {alarm}")
            tell(f"{'ALARM' if alarm else 'silent'} {label} {alarm}")
            if quick and report.good_runs >= GOOD_QUICK:
                return


def _good(shop: Workshop, family: str, quick: bool) -> Iterator[tuple[str, str, int, int, int]]:
    """``(what it is, family, degree, seed, degree that it was resharded from or 0)``."""
    degrees = shop.degrees(family)
    if quick:
        yield f"{family}, {degrees[-1]} ranks", family, degrees[-1], 0, 0
        return
    for seed, tp_size in product(SEEDS, degrees):
        yield f"{family}, {tp_size} ranks, seed {seed}", family, tp_size, seed, 0
    for old, new in product(degrees, degrees):
        if old != new:
            yield f"{family}, {old} to {new} ranks", family, new, 0, old


def _add_up(report: SelfTest, *, everything: bool) -> None:
    """Sum up; where all families were run, a fault that had no place in any was not shown to be seen."""
    faults = [fault for fault in report.faults if fault.kind != EQUIVALENT]
    same = [fault for fault in report.faults if fault.kind == EQUIVALENT]
    report.good_runs += len(same)
    report.alarms += [
        f"{fault.name} ({fault.family}, {fault.tp_size} ranks): {fault.note}" for fault in same if not fault.caught
    ]
    report.kinds = len({fault.name for fault in faults})
    report.planted, report.caught = len(faults), sum(fault.caught for fault in faults)
    report.passed = bool(faults) and report.caught == report.planted and report.good_runs > 0 and not report.alarms
    report.passed &= not (everything and report.untried)


def missed(report: SelfTest) -> list[Fault]:
    """The faults that were not caught."""
    return [fault for fault in report.faults if not fault.caught and fault.kind != EQUIVALENT]

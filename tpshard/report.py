"""Reports as text for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .counting import counted
from .degrees import listed
from .errors import short
from .reports import Conversion, Demonstration, Export, Fault, Listing, Report, Rollback, SelfTest, Survey, Verification


def render(report: Report) -> str:
    """The report as lines of text."""
    if isinstance(report, Conversion):
        return "\n".join(_conversion(report))
    if isinstance(report, Verification):
        return "\n".join(_verification(report))
    if isinstance(report, Survey):
        return "\n".join(_survey(report))
    if isinstance(report, Demonstration):
        return "\n".join(_demonstration(report))
    if isinstance(report, SelfTest):
        return "\n".join(_selftest(report))
    if isinstance(report, Listing):
        return "\n".join(_listing(report))
    if isinstance(report, Rollback):
        kept = f"; what it held until now is kept in {report.kept}" if report.kept else ""
        return f"rollback {report.output}: it holds what it held before{kept}"
    return str(report.as_json())


def size(nbytes: int | float) -> str:
    """Bytes for people: ``2.47 GB`` (10**9)."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1000
    return ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns of text, the first to the left and the others to the right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(head))]
    out = []
    for first, *rest in lines:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        out.append("  ".join(cells).rstrip())
    return out


def _conversion(report: Conversion) -> list[str]:
    done = "would write" if report.dry_run else "wrote"
    arrow = {
        "split": f"to {counted(report.to_tp_size, 'rank')}",
        "reshard": f"from {counted(report.from_tp_size, 'rank')} to {report.to_tp_size:,}",
        "merge": f"from {counted(report.from_tp_size, 'rank')}",
        "export": _for_engine(report),
    }[report.verb]
    total = sum(report.rank_bytes)
    lines = [f"{report.verb} {report.source} {arrow}: {done} {report.output}"]
    held = f"{counted(report.tensors, 'tensor')}, {size(total)} in {counted(report.files, 'file')}"
    lines.append(f"  {report.family}, {held}")
    if report.verb != "merge" and report.to_tp_size > 1:
        low, high = min(report.rank_bytes), max(report.rank_bytes)
        each = size(low) if low == high else f"{size(low)} to {size(high)}"
        lines.append(f"  {each} a rank; sharded fraction {report.sharded_fraction:.4f}")
    lines += [f"  unequal: {text}" for text in report.uneven]
    lines += [f"  not cut: {text}" for text in report.held_whole]
    lines += [f"  padding: {text}" for text in report.padding]
    lines += [f"  needs a sum over ranks: {pattern}" for pattern in report.needs_sum]
    lines += [f"  added once, whole on every rank: {pattern}" for pattern in report.added_once]
    lines += [f"  tied: {alias} is {name}" for alias, name in report.aliases.items()]
    lines += [f"  copied whole, no rule knows it: {short(name)}" for name in report.copied_whole]
    when = " at the split" if report.verb == "merge" else ""
    lines += [f"  left out{when}: {name}" for name in report.left_out]
    if report.side_files:
        lines.append(f"  {counted(report.side_files, 'other file')} carried")
    if report.bytes_kept:
        lines.append(f"  {size(report.bytes_kept)} were there already from an unfinished run, checked by digest")
    if report.verification is not None:
        passed = ", ".join(report.verification.levels)
        lines.append(f"  verified before it was published: {passed}")
    if report.identical_to_source:
        verdict = "will be" if report.dry_run else "are"
        lines.append(f"  weight files and index {verdict} the source's, byte for byte (every digest is checked)")
    return lines


def _for_engine(report: Conversion) -> str:
    if not isinstance(report, Export):
        return ""
    degrees = [f"TP {report.to_tp_size}"]
    degrees += [f"PP {report.pp_size}"] if report.pp_size > 1 else []
    degrees += [f"EP {report.ep_size}"] if report.ep_size > 1 else []
    return f"for {report.engine} {report.version} at {' x '.join(degrees)}"


def _verification(report: Verification) -> list[str]:
    from .outputs.headline import counts_of, verdict_of

    lines = [f"verify {report.shards}: {verdict_of(report)}"]
    lines.append(f"  {', '.join([counted(report.tp_size, 'rank'), *counts_of(report)])}")
    if report.verdicts:
        from .outputs.lines import lines as of_level

        lines += [line for verdict in report.verdicts for line in of_level(verdict)]
    lines += [f"  {finding.level}: {finding.message}" for finding in report.findings[:50]]
    if len(report.findings) > 50:
        lines.append(f"  and {counted(len(report.findings) - 50, 'more finding')} (--json lists all)")
    lines += [f"  note: {text}" for text in report.warnings]
    return lines


def _survey(report: Survey) -> list[str]:
    ranks = f" on {counted(report.tp_size, 'rank')}" if report.kind == "shards" else ""
    lines = [f"{report.path}: {report.kind}{ranks}"]
    kind = f"{report.family}" + (f" ({report.model_type})" if report.model_type not in ("", report.family) else "")
    dtypes = ", ".join(f"{dtype} {size(held)}" for dtype, held in report.dtypes.items())
    held = f"{counted(report.tensors, 'tensor')}, {size(report.bytes)} ({dtypes}) in {counted(report.files, 'file')}"
    lines.append(f"  {kind}, {held}")
    lines += [f"  axis {name}: {text}" for name, text in report.axes.items()]
    if report.largest_degree:
        lines.append(f"  degrees: any from 1 to {report.largest_degree}; equal ranks at {listed(report.equal_degrees)}")
    lines += [f"  needs a sum over ranks: {pattern}" for pattern in report.needs_sum]
    lines += [f"  added once, whole on every rank: {pattern}" for pattern in report.added_once]
    lines += [f"  tied: {alias} is {name}" for alias, name in report.aliases.items()]
    lines += [f"  copied whole, no rule knows it: {short(name)}" for name in report.copied_whole]
    lines += [f"  left out: {name}" for name in report.left_out]
    lines += [f"  note: {text}" for text in report.warnings]
    if report.degrees:
        rows = []
        for degree in report.degrees:
            if not degree.possible:
                continue
            low, high = min(degree.rank_bytes), max(degree.rank_bytes)
            rows.append(
                (
                    str(degree.tp_size), "yes" if degree.equal else "no", size(low), size(high),
                    size(sum(degree.rank_bytes)), f"{degree.sharded_fraction:.4f}",
                )
            )  # fmt: skip
        if rows:
            head = ("tp", "equal", "smallest rank", "largest rank", "all ranks", "sharded fraction")
            lines += ["", *table(head, rows)]
        for degree in report.degrees:
            lines += [f"tp {degree.tp_size}: {text}" for text in (*degree.uneven, *degree.held_whole, *degree.padding)]
            if not degree.possible:
                lines.append(f"tp {degree.tp_size}: not possible: {degree.reason}")
    return lines


def _demonstration(report: Demonstration) -> list[str]:
    rows = [(s.name, str(s.tp_size), str(s.files), size(s.nbytes), f"{s.seconds:.3f}") for s in report.steps]
    lines = table(("step", "ranks", "files", "bytes", "seconds"), rows)
    lines += [""] + [f"{'ok ' if check.passed else 'BAD'} {check.claim}" for check in report.checks]
    return [*lines, f"files kept in {report.directory}"] if report.directory else lines


def _listing(report: Listing) -> list[str]:
    if report.what == "engines":
        lines = []
        for entry in report.entries:
            lines.append(f"{entry.name:<16}{entry.summary}")
            lines += [f"{'':<16}  {version}" for version in entry.serves]
        return lines
    return table((report.what, "serves"), [(entry.name, ", ".join(entry.serves)) for entry in report.entries])


def _selftest(report: SelfTest) -> list[str]:
    by_name: dict[str, list[Fault]] = {}
    for fault in report.faults:
        by_name.setdefault(fault.name, []).append(fault)
    lines = table(
        ("fault", "kind", "caught", "families", "seen by", "least error", "its gate"),
        [_fault_row(name, faults) for name, faults in by_name.items() if faults[0].kind != "equivalent"],
    )
    bad = [fault for fault in report.faults if not fault.caught and fault.kind != "equivalent"]
    lines += [""] + [f"MISSED {f.name} ({f.family}, {f.tp_size} ranks, {f.way}): {f.note}" for f in bad]
    lines += [f"ALARM  {text}" for text in report.alarms]
    lines += [f"no place in these families: {name}" for name in report.untried]
    lines.append(
        f"selftest {'passed' if report.passed else 'FAILED'}: {report.caught} of {report.planted} faults caught "
        f"({report.kinds} kinds, {len(report.families)} families), {len(report.alarms)} alarms in {report.good_runs} "
        f"good runs, {report.seconds:.0f} s"
    )
    return lines


def _fault_row(name: str, faults: Sequence[Fault]) -> tuple[str, ...]:
    """One line for a fault in all families: its weakest trace is the one with the least error over its gate."""
    levels = dict.fromkeys(level for fault in faults for level in fault.levels)
    seen = [f"{level} {n}" for level in levels if (n := sum(level in fault.levels for fault in faults))]
    measured = [fault for fault in faults if fault.point]
    least = min(measured, key=lambda f: f.error / f.gate if f.gate else f.error * 1e20, default=None)
    families = len({fault.family for fault in faults})
    caught = f"{sum(fault.caught for fault in faults)}/{len(faults)}"
    error, gate = ("", "") if least is None else (f"{least.error:.1e}", f"{least.gate:.0e}")
    return name, faults[0].kind, caught, str(families), ", ".join(seen), error, gate

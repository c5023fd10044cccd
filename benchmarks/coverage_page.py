"""The page docs/coverage.md from what coverage.py measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]
TITLES = {
    "causal": "Causal language models",
    "masked": "Masked language models",
    "seq2seq": "Sequence to sequence",
    "vlm": "Image and text to text",
    "speech": "Speech to text",
    "base": "Encoders and other models without a head",
}
LEAST_SHARDED = 0.95
HEAD = """# Which architectures are covered

Made by `python benchmarks/coverage.py` from tiny random checkpoints of every architecture of transformers 5.24, norms
and biases random too, under the names that released files have. For each: split at the degrees named (the last is the
largest that its axes allow), every split merged back and compared byte for byte with the source, every degree
resharded from the one before and compared with a direct split, the plan judged, and the ranks run in float64 against
the original. A row is what has been measured; `--resume` measures what is missing.

* *error*: the largest relative difference from the original at any point where ranks meet, and the gate it had to pass;
* *reached*: the part of the parameters that the run of the ranks reached; the rest is compared by bytes;
* *sharded*: `(1 - mean rank bytes / total) / (1 - 1 / TP)` at TP 8 (or the largest below it) on the shapes of a
  released model, the default config of the class in transformers (where that makes no model the numbers of
  tests/zoo/releases.py), and its parameters; 1: everything is cut;
* *collectives a layer*: all-reduces (r), small reductions for norms (n), gathers (g), without embedding and head;
* encoders and other models without a head: those that no class with a head serves, which would be measured twice;
* *transformers*: whether its own tensor parallelism gives the logits of one process at TP 2 and 4 (float32, 1e-3) where
  there are 4 KV heads, so that heads divide.
"""


def page(results: dict[str, Any]) -> str:
    """The page as Markdown."""
    rows: list[Row] = results["rows"]
    base = [row for row in rows if not row["variant"]]
    lines = [HEAD, *_summary(base, rows, results["peer"])]
    for task, title in TITLES.items():
        of_task = sorted((row for row in base if row["task"] == task), key=lambda row: row["model_type"])
        if of_task:
            lines += ["", f"## {title}", "", *_table(of_task, rows, results["peer"] if task == "causal" else {})]
    lines += ["", "## Sharded below 0.95, and what stays whole there", "", *_below(base)]
    lines += ["", "## Cut, and not run by the ranks", "", *_not_run(base)]
    if len(base) < len(rows):
        lines += ["", "## Variants", "", *_variants(rows)]
    lines += ["", "## What stays whole, and why", "", *_whole(base)]
    return "\n".join(lines) + "\n"


def is_clean(row: Row) -> bool:
    """Cut, joined, re-cut and run without a difference."""
    return not row["problems"] and not row.get("unsupported") and row.get("error") is not None


def _summary(base: Sequence[Row], rows: Sequence[Row], peer: dict[str, dict[str, str]]) -> Iterable[str]:
    yield "| task | architectures | cut and run by the ranks | cut, not run | not covered | variants clean |"
    yield "|---|---|---|---|---|---|"
    for task, title in TITLES.items():
        of_task = [row for row in base if row["task"] == task]
        if of_task:
            clean = sum(map(is_clean, of_task))
            cut = sum(not row["problems"] and bool(row.get("family")) and not is_clean(row) for row in of_task)
            variants = [r for r in rows if r["task"] == task and r["variant"] and r.get("family")]
            good = f"{sum(map(is_clean, variants))} of {len(variants)}" if variants else ""
            yield f"| {title} | {len(of_task)} | {clean} | {cut} | {len(of_task) - clean - cut} | {good} |"
    for tp_size, found in sorted(peer.items()):
        equal = sum(result == "equal" for result in found.values())
        yield ""
        yield f"transformers' own tensor parallelism at TP {tp_size}: {equal} of {len(found)} causal models equal."


def _table(of_task: Sequence[Row], rows: Sequence[Row], peer: dict[str, dict[str, str]]) -> Iterable[str]:
    beside = " | transformers" if peer else ""
    yield f"| architecture | table | degrees | merge | error (gate) | reached | sharded | collectives a layer{beside} |"
    yield "|---" * (9 if peer else 8) + "|"
    for row in of_task:
        same = [r for r in rows if (r["task"], r["model_type"]) == (row["task"], row["model_type"])]
        failed = [r["variant"] for r in same if r["variant"] and r["problems"]]
        name = row["model_type"] + (f" (not: {', '.join(failed)})" if failed else "")
        cells = [name, row.get("family") or "none", *_cells(row)]
        if peer:
            cells.append(" / ".join(_short(peer[size].get(row["model_type"], "")) for size in sorted(peer)))
        yield "| " + " | ".join(cells) + " |"


def _cells(row: Row) -> list[str]:
    if not row.get("family"):
        why = (row.get("unsupported") or "; ".join(row["problems"])).replace("|", "/")
        return ["", "", f"{why:.160}", "", "", ""]
    degrees = ", ".join(map(str, row["degrees"]))
    merged = "equal" if not any("merged" in p or "resharded" in p for p in row["problems"]) else "NOT EQUAL"
    if row.get("unsupported"):
        error = f"not run: {row['unsupported']:.120}".replace("|", "/")
    elif row["problems"]:
        error = f"FAILS: {row['problems'][0]:.160}".replace("|", "/")
    else:
        error = f"{row['error']:.1e} ({row['gate']:.0e})" if row.get("error") is not None else ""
    reached = f"{row['coverage']:.1%}" if row.get("coverage") is not None else ""
    return [degrees, merged, error, reached, _sharded(row), _collectives(row)]


def _sharded(row: Row) -> str:
    found = row.get("released_sharded")
    if not found:
        return row.get("released_problem", "")[:80].replace("|", "/")
    degree = max(found, key=int)
    told = f"{found[degree]:.3f}" + ("" if degree == "8" else f" (TP {degree})")
    return f"{told} of {_size(row['released_parameters'])}"


def _size(parameters: int) -> str:
    return f"{parameters / 1e9:.3g}B" if parameters >= 1e9 else f"{parameters / 1e6:.3g}M"


def _collectives(row: Row) -> str:
    layers, found = row.get("layers") or 1, row.get("collectives") or {}
    sums = max(0, found.get("all_reduce", 0) - 1) / layers
    gathers = max(0, found.get("all_gather", 0) - 1) / layers
    parts = [f"{sums:.3g}r"]
    if found.get("norm_all_reduce"):
        parts.append(f"{found['norm_all_reduce'] / layers:.3g}n")
    if gathers:
        parts.append(f"{gathers:.3g}g")
    return " ".join(parts) if found else ""


def _short(result: str) -> str:
    return result.split(":")[0] if result.startswith("fails") else result


def _below(base: Sequence[Row]) -> Iterable[str]:
    """The released sizes of which less is cut, with the share of the parameters that stays whole by reason."""
    yield "Of the released sizes; shares of all parameters at any degree, where more than 1 in 500. Where the fraction"
    yield "at TP 2 is larger, a part has fewer heads than 8 and is whole on more ranks than that."
    yield ""
    yield "| architecture | sharded | at TP 2 | whole |"
    yield "|---|---|---|---|"
    seen: set[str] = set()
    for row in sorted(base, key=lambda row: row["model_type"]):
        found = row.get("released_sharded") or {}
        if not found or row["model_type"] in seen or found[max(found, key=int)] >= LEAST_SHARDED:
            continue
        seen.add(row["model_type"])
        parts = sorted(row.get("released_whole", {}).items(), key=lambda part: -part[1])
        why = "; ".join(f"{share:.1%} {reason}" for reason, share in parts)
        yield f"| {row['model_type']} | {_sharded(row)} | {found.get('2', found[min(found, key=int)]):.3f} | {why} |"


def _not_run(base: Sequence[Row]) -> Iterable[str]:
    """Models whose ranks were not run against the original, and why."""
    yield "Split, merged, resharded and judged by their plan; the code of transformers did not run on what was given."
    yield ""
    yield "| architecture | task | why |"
    yield "|---|---|---|"
    for row in base:
        if row.get("family") and row.get("unsupported"):
            yield f"| {row['model_type']} | {row['task']} | {row['unsupported'].replace('|', '/'):.200} |"


def _variants(rows: Sequence[Row]) -> Iterable[str]:
    """Structures that other released files of a type have, and odd sizes; one line an architecture."""
    yield "`mqa`: one KV head; `odd`: sizes that no degree divides; others: what released checkpoints of the type have."
    yield ""
    yield "| architecture | clean | not |"
    yield "|---|---|---|"
    by_type: dict[str, list[Row]] = {}
    for row in rows:
        if row["variant"]:
            by_type.setdefault(row["model_type"], []).append(row)
    for model_type, of_type in sorted(by_type.items()):
        clean = ", ".join(row["variant"] for row in of_type if is_clean(row))
        why = "; ".join(
            f"{row['variant']}: {(row['problems'] or [row.get('unsupported') or 'not run'])[0]:.120}".replace("|", "/")
            for row in of_type
            if not is_clean(row)
        )
        yield f"| {model_type} | {clean} | {why} |"


def _whole(base: Sequence[Row]) -> Iterable[str]:
    """Reasons with the tensors that have them, norms, biases added once and routers left out as the same everywhere."""
    usual = ("norm", "norm_bias", "added once", "router", "position", "buffer")
    by_reason: dict[str, dict[str, set[str]]] = {}
    for row in base:
        for pattern, reason in row.get("whole", {}).items():
            if not reason.startswith(usual):
                name = ".".join(part for part in pattern.split(".") if part != "#")[-60:]
                by_reason.setdefault(reason, {}).setdefault(name, set()).add(row["family"])
    yield "Norms, routers, positions and biases that are added once stay whole in every family. Besides:"
    yield ""
    yield "| why | tensors | families |"
    yield "|---|---|---|"
    for reason, tensors in sorted(by_reason.items()):
        names = sorted(tensors)
        shown = ", ".join(f"`{name}`" for name in names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        yield f"| {reason} | {shown} | {', '.join(sorted(set().union(*tensors.values())))} |"

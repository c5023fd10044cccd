"""Every architecture of transformers: cut, joined, re-cut, run by its ranks; and transformers' own tensor parallelism.

    python benchmarks/coverage.py                        # all tasks; writes docs/coverage.md and its JSON
    python benchmarks/coverage.py --tasks causal --only llama --only mixtral --dry-run

Tiny random checkpoints are made on the spot under the names that released files have (tests/zoo). The sharded
fraction of released sizes comes from true shapes in sparse files. Minutes on 2 cores for the causal models.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
os.environ["OMP_NUM_THREADS"] = "1"

from coverage_page import page  # noqa: E402

TASKS = ("causal", "masked", "seq2seq", "vlm", "speech", "base")
RELEASED_AT = 8  # ranks, for the sharded fraction of released sizes
WORTH_TELLING = 0.002  # of the parameters, that stay whole for one reason


def checked(job: tuple[str, str, str]) -> dict[str, Any]:
    """One architecture through everything, in a process of its own."""
    import torch
    from zoo.conformance import check

    torch.set_num_threads(1)
    task, model_type, variant = job
    terms: dict[str, Any] = {"degrees": (2, 3), "run_at": (3,)} if variant else {}
    with tempfile.TemporaryDirectory() as directory:
        try:
            out = asdict(check(model_type, Path(directory), task=task, variant=variant, **terms))
        except Exception as error:  # of transformers or torch: it is said, and the others go on
            out = {"model_type": model_type, "task": task, "variant": variant, "problems": [], "whole": {}}
            out["unsupported"] = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
    if not variant and out.get("family"):
        out |= _released(model_type, task)
    return out


def _released(model_type: str, task: str) -> dict[str, Any]:
    """Parameters and sharded fraction of the released sizes, and the share of what stays whole by reason."""
    from math import prod

    from zoo.released import released, write_sparse

    from tpshard.checkpoint import open_checkpoint
    from tpshard.survey import plan

    whole: dict[str, float] = {}
    try:
        config, shapes = released(model_type, task)
        with tempfile.TemporaryDirectory() as directory:
            model = write_sparse(Path(directory) / "model", config, shapes)
            survey = plan(model, [2, 4, RELEASED_AT])
            matched = open_checkpoint(model).matched
        for name, dims in matched.dims.items():
            if not any(dim.axes for dim in dims):
                rule = matched.rules[name]
                why = rule.note.removeprefix("whole: ") or rule.role
                whole[why] = whole.get(why, 0.0) + prod(shapes[name]) / sum(map(prod, shapes.values()))
    except Exception as error:  # what cannot be made at its full size even without weights
        return {"released_problem": f"{type(error).__name__}: {' '.join(str(error).split()):.200}"}
    possible = [degree for degree in survey.degrees if degree.possible]
    return {
        "released_parameters": sum(map(prod, shapes.values())),
        "released_largest": survey.largest_degree,
        "released_sharded": {degree.tp_size: degree.sharded_fraction for degree in possible},
        "released_whole": {why: share for why, share in whole.items() if share > WORTH_TELLING},
    }


def jobs_of(tasks: list[str], only: list[str]) -> list[tuple[str, str, str]]:
    """Task, model type and variant of everything that is to be tried."""
    import zoo

    found = []
    headed = {model_type for task in TASKS if task != "base" for model_type in zoo.architectures(task)}
    for task in tasks:
        for model_type in zoo.architectures(task):
            if (only and model_type not in only) or (task == "base" and model_type in headed):
                continue  # a model with a head is measured with it
            found.append((task, model_type, ""))
            if task == "causal":
                found += [(task, model_type, variant) for variant in (*zoo.variants(model_type), "mqa", "odd")]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(TASKS), help="Of " + ", ".join(TASKS))
    parser.add_argument("--only", action="append", default=[], help="This model type alone; may be repeated.")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--without-variants", action="store_true", help="Leave out structural variants.")
    parser.add_argument("--resume", action="store_true", help="Leave out what the JSON has already without a problem.")
    parser.add_argument("--released", action="store_true", help="Only the figures of released sizes, of what it has.")
    parser.add_argument("--without-peer", action="store_true", help="Leave out transformers' own tensor parallelism.")
    parser.add_argument("--dry-run", action="store_true", help="Print the page and write nothing.")
    options = parser.parse_args()
    tasks = options.tasks.split(",")
    kept = ROOT / "docs" / "measurements" / "coverage.json"
    before: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {"rows": [], "peer": {}}
    rows = {(r["task"], r["model_type"], r["variant"]): r for r in before["rows"]}
    jobs = jobs_of(tasks, options.only)
    if options.released:
        _measure_released(jobs, rows)
        jobs = []
    settled = {job for job, row in rows.items() if not row["problems"]} if options.resume else set()
    todo = [job for job in jobs if not (options.without_variants and job[2]) and job not in settled]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.processes, context) as pool:
        for job, row in zip(todo, pool.map(checked, todo), strict=True):
            rows[job] = row
            if not options.dry_run:
                _keep(kept, rows, before["peer"])
            state = "; ".join(row["problems"])[:150] or (row.get("unsupported") or "clean")[:150]
            print(f"{' '.join(filter(None, job))}: {state}", file=sys.stderr, flush=True)
    peer = dict(before["peer"])
    if "causal" in tasks and not options.without_peer and not options.released:
        from transformers_tp import measured

        names = [model_type for task, model_type, variant in jobs if task == "causal" and not variant]
        for tp_size in (2, 4):
            found = measured(names, tp_size, lambda line: print(line, file=sys.stderr, flush=True))
            peer[str(tp_size)] = peer.get(str(tp_size), {}) | found
    text = page(json.loads(json.dumps({"rows": list(rows.values()), "peer": peer})))
    if options.dry_run:
        print(text)
        return
    _keep(kept, rows, peer)
    (ROOT / "docs" / "coverage.md").write_text(text)


def _measure_released(jobs: Sequence[tuple[str, str, str]], rows: dict[tuple[str, str, str], Any]) -> None:
    """Measure the released sizes of these rows anew."""
    for job in jobs:
        if job in rows and not job[2] and rows[job].get("family"):
            row = {key: value for key, value in rows[job].items() if not key.startswith("released_")}
            rows[job] = row | _released(job[1], job[0])


def _keep(path: Path, rows: dict[tuple[str, str, str], Any], peer: dict[str, Any]) -> None:
    """Write what has been measured so far, so that a run that is ended can be resumed."""
    path.write_text(json.dumps({"rows": list(rows.values()), "peer": peer}, indent=1) + "\n")


if __name__ == "__main__":
    main()

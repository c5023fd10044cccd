"""How many architectures `tpshard derive` gets right by itself: no table that is installed is asked.

    python benchmarks/derive_all.py                          # every causal language model; resumes where it was ended
    python benchmarks/derive_all.py --only llama --again     # one anew
    python benchmarks/derive_all.py --page                   # the page of what was measured so far

For each a tiny random checkpoint is made (tests/zoo), its table derived, and the checkpoint split by it, run by its
ranks and merged at TP 2 and 3. *Right*: the ranks ran as the original at every degree, merging gave the same files,
and the sharded fraction is at least 0.95 of the written table's, or of 1 where there is none. The written table is
only asked afterwards, for that comparison.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
os.environ["OMP_NUM_THREADS"] = "1"

KEPT = ROOT / "docs" / "measurements" / "derive.json"
PAGE = ROOT / "docs" / "measurements" / "derive.md"
DEGREES = (2, 3)
EVERY = 196  # causal language models of transformers 5.24
SHARE = 0.95  # of the written table's sharded fraction
SECONDS = 240  # of the CPU, for one architecture


def measured(model_type: str) -> dict[str, Any]:
    """One architecture: its line of the page."""
    import torch

    torch.set_num_threads(1)
    row: dict[str, Any] = {"model_type": model_type, "code": code()}
    started, cpu = time.monotonic(), time.process_time()
    signal.signal(signal.SIGPROF, _too_long)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        with tempfile.TemporaryDirectory() as directory:
            _derived(row, model_type, Path(directory) / "model")
    except Exception as error:  # of transformers, torch or tpshard: it is said, and the others go on
        row["problem"] = f"{type(error).__name__}: {' '.join(str(error).split()):.250}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    row["seconds"], row["cpu_seconds"] = round(time.monotonic() - started, 1), round(time.process_time() - cpu, 1)
    row["right"] = _is_right(row)
    return row


def code() -> str:
    """A digest of the code that derives: rows that an earlier one made are told apart."""
    files = sorted((ROOT / "tpshard" / "derivation").glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def _too_long(*signal: object) -> None:
    raise TimeoutError(f"not done after {SECONDS} s of the CPU")


def _derived(row: dict[str, Any], model_type: str, root: Path) -> None:
    import zoo

    from tpshard.derivation.derive import derive
    from tpshard.errors import TpshardError
    from tpshard.survey import plan

    try:
        zoo.write(model_type, root)
    except Exception as error:  # what transformers itself cannot make
        row["unsupported"] = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
        return
    found = derive(root, degrees=DEGREES)
    row["class"] = found.class_name
    row["trials"] = [
        {"tp": t.tp_size, "problem": t.problem[:250], "merged": t.merged, "fraction": t.fraction, "uncut": t.uncut}
        for t in found.trials
    ]
    row["proven"], row["axes"], row["whole"], row["remarks"] = found.proven, found.axes, found.whole, found.remarks
    row["lines"] = len(found.text.splitlines())
    try:
        survey = plan(root, list(DEGREES))
        row["written"] = {d.tp_size: d.sharded_fraction for d in survey.degrees if d.possible}
    except TpshardError as error:
        row["written_problem"] = str(error)[:200]


def _is_right(row: dict[str, Any]) -> bool:
    if not row.get("proven") or any(trial["uncut"] for trial in row["trials"]):
        return False
    written = row.get("written", {})
    return all(trial["fraction"] >= SHARE * written.get(trial["tp"], 1.0) for trial in row["trials"])


def reason(row: dict[str, Any]) -> str:
    """Why a row is not right."""
    if row["right"]:
        return ""
    if "unsupported" in row or "problem" in row:
        return str(row.get("unsupported") or row["problem"])
    for trial in row["trials"]:
        if trial["problem"]:
            return f"TP {trial['tp']}: {trial['problem']}"
    left = "; ".join(f"{name}: {why}" for name, why in row["whole"].items())
    return f"sharded fraction {min(t['fraction'] for t in row['trials']):.3f}; whole: {left}"


def page(rows: list[dict[str, Any]]) -> str:
    """The figures as Markdown."""
    run = [row for row in rows if "unsupported" not in row]
    right = [row for row in run if row["right"]]
    proven = [row for row in run if row.get("proven")]
    now = sum(row.get("code") == code() for row in rows)
    minutes = sum(row["cpu_seconds"] for row in rows) / 60
    kinds = Counter("right" if r["right"] else "proven, less cut" if r.get("proven") else "not" for r in run)
    lines = [
        "# Tables derived, the written ones hidden",
        "",
        f"`tpshard derive` gets **{len(right)} of the {len(run)}** causal language models tried so far right by itself",
        f"({len(proven)} proven by running the ranks; {minutes:.0f} CPU minutes). *Right*: the ranks of a tiny",
        "checkpoint run as the original at TP 2 and 3, merging gives the same files, and the sharded fraction is at",
        f"least {SHARE} of the written table's (of 1 where there is none).",
        "",
        f"Measured so far: {len(rows)} architectures of {EVERY}, {now} of them with the code as it stands, the others",
        "with earlier states of it: a row says which. Most of the earlier ones did not ask `verify`'s level *plan*, as",
        "a proof now does. Nothing is said of those that were not measured. The command goes on with them; `--failed`",
        "measures anew what was not right.",
        "",
        f"Command: `python benchmarks/derive_all.py`. {', '.join(f'{n} {kind}' for kind, n in kinds.items())}.",
        "",
        "| architecture | right | proven | sharded TP 2 | written | CPU s | code | why not |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda r: r["model_type"]):
        trials = row.get("trials") or [{"fraction": 0.0}]
        written = row.get("written", {})
        usual = next(iter(written.values()), None)
        lines.append(
            f"| {row['model_type']} | {'yes' if row['right'] else 'no'} | {'yes' if row.get('proven') else 'no'} | "
            f"{trials[0]['fraction']:.3f} | {'-' if usual is None else f'{usual:.3f}'} | {row['cpu_seconds']:.0f} | "
            f"{'now' if row.get('code') == code() else 'earlier'} | {reason(row)[:220].replace('|', '/')} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="This model type alone; may be repeated.")
    parser.add_argument("--again", action="store_true", help="Also what was measured before.")
    parser.add_argument("--failed", action="store_true", help="Also what was measured before and was not right.")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--page", action="store_true", help="Write the page and measure nothing.")
    options = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    if KEPT.exists():
        rows = {row["model_type"]: row for row in json.loads(KEPT.read_text())}
    if not options.page:
        import zoo

        names = options.only or zoo.architectures("causal")
        names = [
            name for name in names if options.again or name not in rows or (options.failed and not rows[name]["right"])
        ]
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(options.processes, context) as pool:
            for done in concurrent.futures.as_completed([pool.submit(measured, name) for name in names]):
                row = done.result()
                rows[row["model_type"]] = row
                KEPT.write_text(json.dumps(list(rows.values()), indent=1) + "\n")
                state = "right" if row["right"] else reason(row)[:160]
                print(f"{row['model_type']}: {state} ({row['cpu_seconds']:.0f} s)", file=sys.stderr, flush=True)
    PAGE.write_text(page(list(rows.values())))


if __name__ == "__main__":
    main()

"""Prometheus' text exposition format, version 0.0.4, for batch jobs.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/ (names, escapes, one HELP and TYPE a metric).
"""

from __future__ import annotations

from collections.abc import Mapping

_HELP = {
    "start_time_seconds": "When the job began, Unix time.",
    "update_time_seconds": "When these metrics were written, Unix time.",
    "duration_seconds": "How long the job has run.",
    "running": "1 while the job runs, 0 when it has ended.",
    "exit_status": "Exit status of the job; 0 while it runs and where it succeeded.",
    "planned_bytes": "Bytes of tensors to be written or compared.",
    "done_bytes": "Bytes of tensors written or compared so far, those kept of an earlier run included.",
    "bytes_per_second": "Bytes of tensors a second since the first was moved.",
    "peak_resident_bytes": "Highest resident set of the process so far.",
}


def exposition(values: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """The metrics ``tpshard_job_NAME``, gauges all of them, each with the labels; ends with a line feed."""
    held = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    lines = []
    for name, value in values.items():
        metric = f"tpshard_job_{name}"
        lines += [f"# HELP {metric} {_HELP[name]}", f"# TYPE {metric} gauge", f"{metric}{{{held}}} {value!r}"]
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

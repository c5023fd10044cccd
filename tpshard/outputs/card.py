"""The verification card: what was verified, by which command and versions, with which result.

It lies beside the shards as ``tpshard-verification.json``. It is no part of them: no manifest lists it,
so structure and digest are not touched by it, and merge and reshard do not carry it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..listing import CARD
from ..manifest import NAME, Manifest
from ..reports import Verification
from ..sidefiles import file_sha256
from ..verdicts import worst
from .files import write_text

SCHEMA = "tpshard.card/1"


def card(report: Verification, manifest: Manifest, manifest_sha256: str, when: datetime) -> dict[str, Any]:
    """The card as JSON values. ``when`` is the end of the run."""
    levels: list[Mapping[str, Any]] = []
    for verdict in report.verdicts:
        top = worst(verdict.measures)
        levels.append(
            {
                "level": verdict.level,
                "verdict": verdict.verdict,
                "mode": verdict.mode,
                "measures": len(verdict.measures),
                "worst": None if top is None else {"point": top.point, "error": top.error, "gate": top.gate},
                "coverage": verdict.coverage,
                "unreached": len(verdict.unreached),
                "collectives": dict(verdict.collectives),
                "collective_bytes_per_token": verdict.collective_bytes_per_token,
                "logits": dict(verdict.logits),
                "findings": [finding.message for finding in verdict.findings[:20]],
                "seconds": round(verdict.seconds, 3),
            }
        )
    return {
        "schema": SCHEMA,
        "passed": report.passed,
        "when": when.astimezone(timezone.utc).isoformat(timespec="seconds"),
        "command": list(report.command),
        "source": manifest.origin.label,
        "against": report.against,
        "family": manifest.origin.family,
        "tp_size": report.tp_size,
        "digests": {
            "content": manifest.content,
            "layout": manifest.layout.digest,
            "config_sha256": manifest.origin.config_sha256,
            "manifest_sha256": manifest_sha256,
            "algorithm": manifest.algorithm,
        },
        "rank_bytes": list(report.rank_bytes),
        "levels": levels,
        "gates": dict(report.gates),
        "versions": dict(report.versions),
        "hardware": dict(report.hardware),
        "baseline": dict(report.baseline),
        "warnings": list(report.warnings),
    }


def write_card(root: Path, report: Verification, manifest: Manifest) -> Path:
    """Write the card into a directory of shards; returns its path.

    Raises:
        StorageError: it cannot be written.
    """
    from ..reports import finite

    path = root / CARD
    values = finite(card(report, manifest, file_sha256(root / NAME), datetime.now(timezone.utc)))
    write_text(path, json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return path

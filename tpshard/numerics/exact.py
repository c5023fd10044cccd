"""What is compared without arithmetic: tables, replicas, buffers, and whatever the run did not reach."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tpshard.manifest import Manifest
from tpshard.reports import Finding
from tpshard.verdicts import Measure

from .coverage import Coverage
from .judge import EXACT, Ledger
from .participant import Participant
from .points import base_role
from .rows import RowDifference, compare_rows
from .skeleton import Skeleton
from .stores import Store

TABLES = ("embed", "head")
_CANCELS = ("k_bias", "qkv_bias")  # softmax takes out what is added to all keys alike: no input may reach it


class Exact:
    """Compares stored tensors of all ranks with the source's; results go to the ledger.

    Args:
        stores: the source's, then each rank's.
    """

    def __init__(
        self,
        level: str,
        manifest: Manifest,
        skeletons: Sequence[Skeleton],
        stores: Sequence[Store],
        coverage: Coverage,
        ledger: Ledger,
    ) -> None:
        self.level, self.manifest, self.skeletons, self.stores = level, manifest, skeletons, stores
        self.coverage, self.ledger = coverage, ledger
        self.findings: list[Finding] = []
        self.notes: list[str] = []
        self._parameters: dict[str, list[str]] = {}
        for parameter, recipe in skeletons[0].recipes.items():
            for name, _ in recipe.tensors:
                self._parameters.setdefault(name, []).append(parameter)
        self._done: set[tuple[str, int]] = set()

    def compare(self, participants: Sequence[Participant]) -> list[str]:
        """Everything; returns the tensors that neither the run nor a table's comparison reached."""
        for name, note in self.manifest.notes.items():
            if base_role(note) in TABLES or note.role in _CANCELS or self._is_looked_up(name):
                self._rows(name, "rows")
                self._settled(name)
        self._replicas(participants)
        self._buffers()
        return self._unreached()

    def _is_looked_up(self, name: str) -> bool:
        """Whether a tensor is a table of which inputs choose rows, as by how far tokens are apart."""
        modules = self.skeletons[0].modules
        owners = [parameter.rpartition(".")[0] for parameter in self._parameters.get(name, ())]
        return any(isinstance(modules[path], nn.Embedding) for path in owners)

    def _replicas(self, participants: Sequence[Participant]) -> None:
        """Tensors that are whole everywhere must be the source's to the bit."""
        for name, digest in participants[0].digests.items():
            for participant in participants[1:]:
                found = participant.digests.get(name)
                if found is not None and found != digest:
                    self._rows(name, "replicated", [participant.number - 1])
            if base_role(self.manifest.notes[name]) == "position":
                self._settled(name)

    def _buffers(self) -> None:
        """Buffers that come from the config: another rope scaling shows here even where no input sees it."""
        expected = dict(self.skeletons[0].computed_buffers())
        for name, buffer in self.skeletons[1].computed_buffers():
            other = expected.get(name)
            if other is None or other.shape != buffer.shape or not torch.equal(other, buffer):
                message = f"{name} comes out differently from the config.json of the shards than from the source's"
                self.findings.append(Finding(self.level, "config.json", name, message))

    def _unreached(self) -> list[str]:
        names: dict[str, None] = {}
        for parameter in self.coverage.unreached():
            for name in self._tensors_of(parameter):
                self._rows(name, "rows")
                names[name] = None
        extra = self.skeletons[0].extra
        for name in extra:
            self._rows(name, "rows")
        if extra:
            self.notes.append(
                f"no parameter of {type(self.skeletons[0].model).__name__} takes {', '.join(extra[:5])}"
                + (f" and {len(extra) - 5} more" if len(extra) > 5 else "")
                + ": compared by bytes only"
            )
        return [*names, *(name for name in extra if name not in names)]

    def _tensors_of(self, parameter: str) -> list[str]:
        """The tensors on disk of a parameter, or of one expert's share of it (``name[3]``)."""
        bank, _, index = parameter.partition("[")
        tensors = [name for name, _ in self.skeletons[0].recipes[bank].tensors]
        if not index or len(tensors) == 1:
            return tensors
        by_pattern: dict[str, list[str]] = {}
        for name, pattern in self.skeletons[0].recipes[bank].tensors:
            by_pattern.setdefault(pattern, []).append(name)
        return [names[int(index[:-1])] for names in by_pattern.values()]

    def _settled(self, name: str) -> None:
        """All rows of the tensor were compared: its parameter needs no other proof of having been looked at."""
        for parameter in self._parameters.get(name, ()):
            if self.skeletons[0].recipes[parameter].plain and parameter in self.coverage.sizes:
                self.coverage.full(parameter)

    def _rows(self, name: str, kind: str, ranks: Sequence[int] | None = None) -> None:
        source, point = self.stores[0], name.rpartition(".")[0]
        for rank in ranks if ranks is not None else range(len(self.stores) - 1):
            store = self.stores[rank + 1]
            part = store.parts.get(name)
            if part is None or (name, rank) in self._done:
                continue
            self._done.add((name, rank))
            found = compare_rows(source, source.parts[name], store, part) or RowDifference(0.0, 0.0, -2, 0)
            note = ""
            if found.rows:
                where = "padding" if found.row == -1 else f"row {found.row}"
                note = f"{found.rows} rows of {name} differ, most of all {where}"
            block = point.rpartition(".")[0] or point
            status = "fail" if found.rows else "pass"
            self.ledger.measures.append(
                Measure(point, block, kind, rank, found.error, None, found.max_abs, EXACT, status, note)
            )

"""Patterns of names: the same tensor of every layer and of every expert has one.

A number in a name counts copies of one thing, or it is the place of one module among others that differ (in an
``nn.Sequential``): ``ffn.0`` and ``ffn.2`` of CTRL are two matrices, not one of two layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from tpshard.table import template_of


class Patterns:
    """Gives each name its pattern: ``#`` in place of the numbers that count copies.

    Args:
        modules: of the model, by path.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._unlike = {template_of(path)[0] for path, module in modules.items() if _is_row_of_unlike(module)}
        self._known: dict[str, str] = {}

    def of(self, name: str) -> str:
        """The pattern of a parameter, of a tensor on disk, or of a module's path."""
        known = self._known.get(name)
        if known is None:
            words: list[str] = []
            path: list[str] = []  # with # for every number
            for word in name.split("."):
                is_number = word.isdigit() and template_of(word)[1] != ()
                words.append("#" if is_number and ".".join(path) not in self._unlike else word)
                path.append("#" if is_number else word)
            known = self._known[name] = ".".join(words)
        return known

    def sorted(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Names by their patterns."""
        out: dict[str, list[str]] = {}
        for name in names:
            out.setdefault(self.of(name), []).append(name)
        return out


def _is_row_of_unlike(module: nn.Module) -> bool:
    """Whether a list of modules holds some that differ and come one after another, not copies of one."""
    if not isinstance(module, nn.Sequential | nn.ModuleList):
        return False
    held = [{n: tuple(p.shape) for n, p in child.named_parameters()} for child in module]
    held = [shapes for shapes in held if shapes]
    if len(held) < 2 or all(shapes == held[0] for shapes in held):
        return False
    return isinstance(module, nn.Sequential) or all("." not in name for shapes in held for name in shapes)

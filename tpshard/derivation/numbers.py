"""Which keys of the config a number follows: the simplest expression that gives it in every config tried."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .variation import Path, is_size, numbers_in

Values = tuple[int, ...]
_FACTORS = {2: 1.0, 3: 1.2, 4: 1.2, 5: 2.5, 6: 2.0, 8: 2.0}  # and how far-fetched each is
UNLIKELY = 3.0  # costs more: keys that are no size, or were the same in all configs


@dataclass(frozen=True)
class Expression:
    """Python source over variables named by :func:`variable`, the keys that it reads, and how far-fetched it is."""

    source: str
    keys: tuple[Path, ...] = ()
    cost: float = 0.0
    atomic: bool = True
    constant: bool = False

    @property
    def inner(self) -> str:
        return self.source if self.atomic else f"({self.source})"


def variable(path: Path) -> str:
    """The name of the variable that holds a key's value."""
    return path[-1] if path[-1].isidentifier() else "key_" + "".join(c if c.isalnum() else "_" for c in path[-1])


class Numbers:
    """The numbers of several configs of one architecture, and what follows from them.

    Args:
        configs: each as the config class gives it (``to_dict``), defaults included.
    """

    def __init__(self, configs: Sequence[Mapping[str, Any]]) -> None:
        tables = [dict(numbers_in(config)) for config in configs]
        shared = [path for path in tables[0] if all(path in table for table in tables)]
        seen: dict[str, Path] = {}
        self.values: dict[Path, Values] = {}
        for path in shared:
            if variable(path) in seen:  # two parts of the model with a key of one name: the first is meant
                continue
            seen[variable(path)] = path
            self.values[path] = tuple(table[path] for table in tables)
        self._known: dict[Values, Expression | None] = {}

    def fit(self, values: Values) -> Expression | None:
        """The simplest expression with these values; a number that is the same everywhere is a constant at worst."""
        if values not in self._known:
            self._known[values] = self._fit(values)
        return self._known[values]

    @cached_property
    def _atoms(self) -> list[tuple[Expression, Values]]:
        out = []
        for path, values in self.values.items():
            odd = (not is_size(path, values[0])) + (len(set(values)) == 1 and len(values) > 1)
            out.append((Expression(variable(path), (path,), 1 + UNLIKELY * odd), values))
        return out

    def _fit(self, values: Values) -> Expression | None:
        found = list(self._matching(values))
        if len(set(values)) == 1:
            found.append(Expression(str(values[0]), cost=1.5 if values[0] == 1 else 6.0, constant=True))
        return min(found, key=lambda e: (e.cost, e.source), default=None)

    def _matching(self, values: Values) -> Iterable[Expression]:
        atoms = self._atoms
        for one, own in atoms:
            if own == values:
                yield one
            for c in _FACTORS:
                if tuple(v * c for v in own) == values:
                    yield _binary(str(c), "*", one, _FACTORS[c])
                if all(v % c == 0 for v in own) and tuple(v // c for v in own) == values:
                    yield Expression(f"{one.source} // {c}", one.keys, one.cost + 0.5 + _FACTORS[c], False)
        pairs = [(a, b, x, y) for a, x in atoms for b, y in atoms]
        products: dict[Values, Expression] = {}
        for a, b, x, y in pairs:
            cost = a.cost + b.cost
            product = tuple(p * q for p, q in zip(x, y, strict=True))
            if a.source <= b.source:
                e = Expression(f"{a.source} * {b.source}", (*a.keys, *b.keys), cost, False)
                if product not in products or e.cost < products[product].cost:
                    products[product] = e
                if product == values:
                    yield e
                for c in _FACTORS:
                    if tuple(v * c for v in product) == values:
                        yield Expression(f"{c} * {e.source}", e.keys, cost + _FACTORS[c], False)
                if tuple(p + q for p, q in zip(x, y, strict=True)) == values:
                    yield Expression(f"{a.source} + {b.source}", (*a.keys, *b.keys), cost + 0.5, False)
            if all(p % q == 0 for p, q in zip(x, y, strict=True)):
                quotient = tuple(p // q for p, q in zip(x, y, strict=True))
                if quotient == values:
                    yield Expression(f"{a.source} // {b.source}", (*a.keys, *b.keys), cost + 0.5, False)
            if (
                all(p > q for p, q in zip(x, y, strict=True))
                and tuple(p - q for p, q in zip(x, y, strict=True)) == values
            ):
                yield Expression(f"{a.source} - {b.source}", (*a.keys, *b.keys), cost + 2.0, False)
            for c in _FACTORS:
                if tuple(p + c * q for p, q in zip(x, y, strict=True)) == values:
                    yield Expression(
                        f"{a.source} + {c} * {b.source}", (*a.keys, *b.keys), cost + 1.0 + _FACTORS[c], False
                    )
                if tuple(c * p for p in x) == tuple(v * q for v, q in zip(values, y, strict=True)):
                    yield Expression(f"{c} * {a.source} // {b.source}", (*a.keys, *b.keys), cost + 1.5, False)
        for product, e in products.items():
            for one, own in atoms:
                if product == tuple(v * q for v, q in zip(values, own, strict=True)) and one.keys[0] not in e.keys:
                    yield Expression(f"{e.source} // {one.source}", (*e.keys, *one.keys), e.cost + one.cost + 1, False)
                if tuple(p + q for p, q in zip(product, own, strict=True)) == values:
                    yield Expression(f"{e.source} + {one.source}", (*e.keys, *one.keys), e.cost + one.cost + 1, False)


def _binary(left: str, sign: str, right: Expression, more: float) -> Expression:
    return Expression(f"{left} {sign} {right.source}", right.keys, right.cost + more, False)


def defaults(
    keys: Iterable[Path], without: Callable[[Path], Sequence[int | None]], numbers: Numbers
) -> dict[Path, Expression]:
    """What a key is where a ``config.json`` leaves it out: a number, or what follows from other keys.

    ``without(key)`` gives the value that the config class has then, one for each config; None for none.
    """
    out = {}
    for key in keys:
        found = without(key)
        if any(value is None for value in found):
            continue
        values = tuple(int(value) for value in found if value is not None)
        if len(set(values)) == 1:
            out[key] = Expression(str(values[0]), constant=True)
            continue
        e = numbers.fit(values)
        if e is not None and key not in e.keys:
            out[key] = e
    return out

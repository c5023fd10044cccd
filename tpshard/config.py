"""Reading numbers out of a model's ``config.json``, with errors that say which key is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .errors import DamagedError, UnsupportedError

CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"  # of a PEFT adapter

_MISSING: Any = object()
LARGEST = 2**40  # no dimension of a real model comes near; a guard against hostile numbers


class Config:
    """A read-only view of ``config.json`` with typed access.

    A key may be given with other spellings that releases have used; the first one present counts.
    A key that is present with the value null counts as absent.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def get(self, *names: str, default: Any = None) -> Any:
        """The raw value of the first of ``names`` that is present, else ``default``."""
        for name in names:
            value = self.values.get(name)
            if value is not None:
                return value
        return default

    def count(self, *names: str, default: Any = _MISSING) -> int:
        """A positive whole number.

        Raises:
            UnsupportedError: none of the names is there and no default is given.
            DamagedError: the value is not a positive whole number.
        """
        value = self.get(*names, default=default)
        if value is _MISSING:
            raise UnsupportedError(
                f"config.json has no '{names[0]}'"
                + (f" (nor {', '.join(map(repr, names[1:]))})" if names[1:] else "")
                + "; the cut cannot be worked out without it"
            )
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST:
            raise DamagedError(f"config.json: '{names[0]}' is {value!r}, not a positive whole number; correct it")
        return value

    def number(self, *names: str, default: int = 0) -> int:
        """A whole number from 0; like :meth:`count` otherwise."""
        value = self.get(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
            raise DamagedError(f"config.json: '{names[0]}' is {value!r}, not a whole number from 0; correct it")
        return value

    def flag(self, *names: str, default: bool) -> bool:
        """True or false; raises DamagedError for anything else."""
        value = self.get(*names, default=default)
        if not isinstance(value, bool):
            raise DamagedError(f"config.json: '{names[0]}' is {value!r}, not true or false; correct it")
        return value

    def head_dim(self, heads: int, *, default: int | None = None) -> int:
        """Indices of one attention head: ``head_dim``, else ``default``, else ``hidden_size / heads``.

        Raises:
            DamagedError: there is no ``head_dim`` and the heads do not divide the hidden size.
        """
        given = self.get("head_dim", default=default)
        if given is not None:
            return self.count("head_dim", default=default)
        hidden = self.count("hidden_size", "n_embd")
        if hidden % heads:
            raise DamagedError(
                f"config.json has no 'head_dim', and {heads} heads do not divide the hidden size {hidden}; "
                "add 'head_dim' or correct the counts"
            )
        return hidden // heads

    def nested(self, *names: str, **usual: Any) -> Config:
        """The configuration that the first of ``names`` holds, as composite models have one for each part.

        ``usual`` gives what released configs leave out since the config class of transformers has it by default.

        Raises:
            DamagedError: none of them is there, or it is not an object.
        """
        value = self.get(*names)
        if not isinstance(value, Mapping):
            raise DamagedError(f"config.json: '{names[0]}' is {value!r:.80}, not an object; restore it")
        return Config({**usual, **{key: held for key, held in value.items() if held is not None or key not in usual}})

    def with_usual(self, **usual: Any) -> Config:
        """The same with values for keys that are not there: defaults of the config class of transformers."""
        return Config({**usual, **self.values})

    def layer_numbers(self, name: str, *, default: Sequence[int] = ()) -> list[int]:
        """A list of numbers of layers, or ``default`` where the config has none.

        Raises:
            DamagedError: it is no list of whole numbers.
        """
        value = self.get(name, default=default)
        if not isinstance(value, (list, tuple)) or any(type(number) is not int for number in value):
            raise DamagedError(f"config.json: '{name}' is {value!r:.80} where layers are listed by number; correct it")
        return list(value)

    def by_layer(self, name: str) -> dict[int, Mapping[str, Any]] | None:
        """What differs from layer to layer, by the layer's number; None where the config has no such key.

        transformers 5 writes the numbers as text with leading zeros: ``per_layer_config: {"05": {"head_dim": 512}}``.

        Raises:
            DamagedError: it is no object of objects by number.
        """
        value = self.get(name)
        if value is None:
            return None
        found: dict[int, Mapping[str, Any]] = {}
        for key, held in value.items() if isinstance(value, Mapping) else [("", None)]:
            if not str(key).isascii() or not str(key).isdigit() or len(str(key)) > 6 or not isinstance(held, Mapping):
                raise DamagedError(f"config.json: '{name}' is {value!r:.80}, not values by layer; restore it")
            found[int(key)] = held
        return found

    def listed(self, name: str, length: int) -> list[Any]:
        """A list with an entry a layer, such as ``layer_types``.

        Raises:
            UnsupportedError: it is not there.
            DamagedError: it is no list, or of another length.
        """
        value = self.get(name)
        if value is None:
            raise UnsupportedError(f"config.json has no '{name}'; the cut cannot be worked out without it")
        if not isinstance(value, list) or len(value) < length:
            found = f"{len(value)} entries" if isinstance(value, list) else f"{value!r:.80}"
            raise DamagedError(f"config.json: '{name}' has {found} for {length} layers; restore it")
        return value[:length]

    @property
    def model_type(self) -> str:
        """The ``model_type``; raises UnsupportedError where there is none."""
        value = self.values.get("model_type")
        if not isinstance(value, str) or not value:
            raise UnsupportedError("config.json has no 'model_type'; add the one that the model's own repository uses")
        return value

"""A pickle reader that cannot execute anything: a small stack machine over the opcodes that state dicts use.

The standard ``pickle`` module calls whatever a pickle names and, even with ``find_class`` overridden,
can be made to hang (hashing nested tuples) or to take gigabytes (a memo index of 2**31). This machine
knows the opcodes of protocols 2 to 5 that tensors and containers need (``Lib/pickletools.py`` describes
them), builds plain values, hashes only strings and numbers, and calls only functions of the caller's
table. Every other opcode and every other global is refused by name.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from tpshard.errors import DamagedError, TpshardError, UnsupportedError

MAX_OPCODES = 3_000_000  # a tensor takes about 30
MAX_MEMO = 1_000_000  # and about 15 of these
MAX_BYTES = 32 << 20
MAX_STACK = 100_000  # the pickler sends containers in batches of 1,000
MAX_TEXT = 1 << 20
_MAX_NAME = 256
_MAX_INTEGER_BYTES = 32  # the magic number of torch's older format takes 10

_REMEDY = "Load the checkpoint where it is trusted and save its weights as safetensors."


class _Mark:
    pass


_MARK = _Mark()


class Function:
    """A function of the caller's table; the machine calls nothing else."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call


class Skipped:
    """Stands for whatever a pickle builds that is no part of a state dict, where that is skipped: it does nothing."""


SKIPPED = Skipped()


class Kind:
    """A class of the caller's table: what is made of it is a :class:`Record`, and nothing runs."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Record:
    """An object of a :class:`Kind`: what the pickle says its state is."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.state: Any = None


def ordered_dict(pairs: object = ()) -> dict[Any, Any]:
    """``collections.OrderedDict(pairs)``, as a plain dict; the keys are strings and numbers only."""
    found: dict[Any, Any] = {}
    if not isinstance(pairs, (list, tuple)):
        raise TypeError("OrderedDict takes a list of pairs")
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise TypeError("OrderedDict takes a list of pairs")
        _put(found, pair[0], pair[1])
    return found


def _put(target: object, key: object, value: object) -> None:
    if isinstance(target, Skipped) or (isinstance(key, Skipped) and type(target) is dict):
        return
    if type(target) is not dict:
        raise TypeError(f"an item set on a {type(target).__name__}")
    if type(key) not in (str, int, bool, float, bytes, type(None), Record):
        raise TypeError(f"a {type(key).__name__} as a key")
    target[key] = value


def load(
    read: Callable[[int], bytes],
    globals_: Mapping[str, object],
    persistent: Callable[[object], object],
    name: str,
    *,
    skip: bool = False,
    times: int = 1,
) -> Any:
    """The value of one pickle, taken from ``read(nbytes)`` without reading a byte past its end.

    ``globals_`` maps ``"module.name"`` to what stands for it (a :class:`Function` where it may be
    called); ``persistent`` turns a persistent id into a value. A global that is not in the table or an
    opcode that builds other objects raises :class:`UnsupportedError`; a pickle that is cut short,
    malformed, or beyond the limits above raises :class:`DamagedError`. Both name the file ``name``.
    With ``skip`` what is not in the table becomes :data:`SKIPPED`, and so does whatever would be made with it: a
    training program's arguments beside its tensors. Nothing is executed then, either. ``times`` multiplies the limits
    on bytes, opcodes and the memo, for pickles that are no state dict.
    """
    machine = _Machine(read, globals_, persistent, name, skip, times)
    try:
        return machine.run()
    except TpshardError:
        raise
    except (IndexError, KeyError, TypeError, ValueError, struct.error, OverflowError) as error:
        raise machine.damaged(f"at its byte {machine.at:,}: {type(error).__name__}: {str(error)[:200]}") from None


class _Machine:
    def __init__(
        self,
        read: Callable[[int], bytes],
        globals_: Mapping[str, object],
        persistent: Callable[[object], object],
        name: str,
        skip: bool,
        times: int,
    ) -> None:
        self.source = read
        self.globals = globals_
        self.persistent = persistent
        self.name = name
        self.skip = skip
        self.times = times
        self.at = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def damaged(self, why: str) -> DamagedError:
        return DamagedError(f"{self.name}: its pickle is not valid {why}. Download or copy the file again.")

    def read(self, nbytes: int) -> bytes:
        self.at += nbytes
        if self.at > MAX_BYTES * self.times:
            raise self.damaged(f"within {MAX_BYTES * self.times:,} bytes, beyond which no state dict goes")
        got = self.source(nbytes)
        if len(got) != nbytes:
            raise self.damaged(f"at its byte {self.at:,}: it is cut short")
        return got

    def number(self, nbytes: int) -> int:
        return int.from_bytes(self.read(nbytes), "little")

    def text(self, nbytes: int) -> str:
        return self.blob(nbytes).decode("utf-8")

    def blob(self, nbytes: int) -> bytes:
        if nbytes > MAX_TEXT:
            raise self.damaged(f"at its byte {self.at:,}: a text of {nbytes:,} bytes")
        return self.read(nbytes)

    def line(self) -> str:
        found = bytearray()
        while (byte := self.read(1)) != b"\n":
            found += byte
            if len(found) > _MAX_NAME:
                raise self.damaged(f"at its byte {self.at:,}: a name of more than {_MAX_NAME} bytes")
        return found.decode("utf-8")

    def integer(self, nbytes: int) -> int:
        if nbytes > _MAX_INTEGER_BYTES:
            raise self.damaged(f"at its byte {self.at:,}: an integer of {nbytes:,} bytes")
        return int.from_bytes(self.read(nbytes), "little", signed=True)

    def marked(self) -> list[Any]:
        """Everything above the topmost mark, which goes too."""
        stack = self.stack
        at = len(stack) - 1
        while stack[at] is not _MARK:  # runs into IndexError where there is no mark
            at -= 1
            if at < 0:
                raise IndexError("no mark on the stack")
        found = stack[at + 1 :]
        del stack[at:]
        return found

    def top(self, count: int) -> tuple[Any, ...]:
        """The topmost ``count`` values, taken off."""
        if len(self.stack) < count:
            raise IndexError("the stack is empty")
        found = tuple(self.stack[len(self.stack) - count :])
        del self.stack[len(self.stack) - count :]
        if any(value is _MARK for value in found):
            raise IndexError("a mark in the place of a value")
        return found

    def find(self, module: object, name: object) -> object:
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a global whose name is not a text")
        try:
            return self.globals[f"{module}.{name}"]
        except KeyError:
            if self.skip:
                return SKIPPED
            raise UnsupportedError(
                f"{self.name}: its pickle asks for {module + '.' + name!r:.200}, which is not part of a plain "
                f"state dict; nothing of it was executed. {_REMEDY}"
            ) from None

    def reduce(self) -> Any:
        function, arguments = self.top(2)
        if self.skip and not isinstance(function, Function):
            return SKIPPED
        if not isinstance(function, Function) or not isinstance(arguments, tuple):
            raise UnsupportedError(
                f"{self.name}: its pickle calls a {type(function).__name__}, which a plain state dict does not; "
                f"nothing of it was executed. {_REMEDY}"
            )
        return function.call(*arguments)

    def remember(self, index: int) -> None:
        self.memo[index] = self.stack[-1]
        if len(self.memo) > MAX_MEMO * self.times:
            raise self.damaged(f"at its byte {self.at:,}: more than {MAX_MEMO * self.times:,} values in its memo")

    def run(self) -> Any:
        stack = self.stack
        for _ in range(MAX_OPCODES * self.times):
            code = self.read(1)
            if code in _MAKERS:
                stack.append(_MAKERS[code](self))
                if len(stack) > MAX_STACK:
                    raise self.damaged(f"at its byte {self.at:,}: more than {MAX_STACK:,} values on its stack")
            elif code in _CHANGERS:
                _CHANGERS[code](self)
            elif code == b"q":
                self.remember(self.number(1))
            elif code == b"r":
                self.remember(self.number(4))
            elif code == b"\x94":
                self.remember(len(self.memo))
            elif code == b".":
                (value,) = self.top(1)
                return value
            else:
                raise UnsupportedError(
                    f"{self.name}: its pickle has the opcode {code!r} at its byte {self.at:,}, which a plain "
                    f"state dict does not need; nothing of it was executed. {_REMEDY}"
                )
        raise self.damaged(f"within {MAX_OPCODES * self.times:,} opcodes, beyond which no state dict goes")


def _proto(machine: _Machine) -> None:
    version = machine.number(1)
    if not 2 <= version <= 5:
        raise machine.damaged(f": protocol {version}, where 2 to 5 are known")


def _frame(machine: _Machine) -> None:
    machine.read(8)  # the length of the frame, a hint for buffering


def _append(machine: _Machine) -> None:
    target, value = machine.top(2)
    _extend(target, [value])
    machine.stack.append(target)


def _appends(machine: _Machine) -> None:
    values = machine.marked()
    (target,) = machine.top(1)
    _extend(target, values)
    machine.stack.append(target)


def _extend(target: object, values: list[Any]) -> None:
    if isinstance(target, Skipped):
        return
    if type(target) is not list:
        raise TypeError(f"values appended to a {type(target).__name__}")
    target.extend(values)


def _setitem(machine: _Machine) -> None:
    target, key, value = machine.top(3)
    _put(target, key, value)
    machine.stack.append(target)


def _setitems(machine: _Machine) -> None:
    values = machine.marked()
    (target,) = machine.top(1)
    if len(values) % 2:
        raise ValueError("a key without a value")
    for at in range(0, len(values), 2):
        _put(target, values[at], values[at + 1])
    machine.stack.append(target)


def _build(machine: _Machine) -> None:
    # Attributes of a dict (torch keeps module versions in `_metadata`): they carry no tensor data.
    target, state = machine.top(2)
    if isinstance(target, Record):
        target.state = state
    elif type(target) is not dict and not isinstance(target, Skipped):
        raise TypeError(f"attributes set on a {type(target).__name__}")
    machine.stack.append(target)


def _new(machine: _Machine) -> object:
    """An object made without a call: of a kind of the table, or skipped."""
    kind, _ = machine.top(2)
    if isinstance(kind, Kind):
        return Record(kind)
    if not machine.skip or isinstance(kind, Function):
        raise UnsupportedError(
            f"{machine.name}: its pickle makes a {type(kind).__name__}, which a plain state dict does not; nothing of "
            f"it was executed. {_REMEDY}"
        )
    return SKIPPED


def _added(machine: _Machine) -> None:
    """Values added to a set, which is only ever skipped."""
    machine.marked()
    (target,) = machine.top(1)
    if not isinstance(target, Skipped):
        raise TypeError(f"values added to a {type(target).__name__}")
    machine.stack.append(target)


def _set(machine: _Machine) -> object:
    if not machine.skip:
        raise UnsupportedError(f"{machine.name}: its pickle has a set, which a plain state dict has not. {_REMEDY}")
    return SKIPPED


def _global(machine: _Machine) -> object:
    module = machine.line()
    return machine.find(module, machine.line())


_MAKERS: dict[bytes, Callable[[_Machine], Any]] = {
    b"(": lambda m: _MARK,
    b"N": lambda m: None,
    b"\x88": lambda m: True,
    b"\x89": lambda m: False,
    b"K": lambda m: m.number(1),
    b"M": lambda m: m.number(2),
    b"J": lambda m: m.integer(4),
    b"\x8a": lambda m: m.integer(m.number(1)),
    b"\x8b": lambda m: m.integer(m.number(4)),
    b"G": lambda m: struct.unpack(">d", m.read(8))[0],
    b"X": lambda m: m.text(m.number(4)),
    b"\x8c": lambda m: m.text(m.number(1)),
    b"\x8d": lambda m: m.text(m.number(8)),
    b"T": lambda m: m.text(m.number(4)),  # a str of Python 2
    b"U": lambda m: m.text(m.number(1)),
    b"B": lambda m: m.blob(m.number(4)),
    b"C": lambda m: m.blob(m.number(1)),
    b")": lambda m: (),
    b"t": lambda m: tuple(m.marked()),
    b"\x85": lambda m: m.top(1),
    b"\x86": lambda m: m.top(2),
    b"\x87": lambda m: m.top(3),
    b"]": lambda m: [],
    b"}": lambda m: {},
    b"h": lambda m: m.memo[m.number(1)],
    b"j": lambda m: m.memo[m.number(4)],
    b"c": _global,
    b"\x93": lambda m: m.find(*m.top(2)),
    b"R": lambda m: m.reduce(),
    b"\x81": _new,
    b"\x8f": _set,
    b"Q": lambda m: m.persistent(*m.top(1)),
}

_CHANGERS: dict[bytes, Callable[[_Machine], None]] = {
    b"\x80": _proto,
    b"\x95": _frame,
    b"a": _append,
    b"e": _appends,
    b"s": _setitem,
    b"u": _setitems,
    b"b": _build,
    b"\x90": _added,
}

"""Objects that exist are given a class of their own: a subclass of theirs, with methods that come before."""

from __future__ import annotations

from typing import Any


def preceded(name: str, first: tuple[type, ...], cls: type, namespace: dict[str, Any]) -> type:
    """Return a subclass of ``cls`` with what is in ``namespace``, then the methods of ``first``, then its own ones. It
    can be assigned to ``__class__`` of an object of ``cls``.

    Python assigns a class of the same layout alone, and takes that of a class from the first of its bases. So ``cls``
    has to be that where it begins with a class that has no attributes, such as ``ABC`` or ``Generic[T]``, and the order
    in which methods are found is then set.
    """
    if _is_laid_out_by(cls) is object:
        return type(name, (*first, cls), namespace)

    class PrecededBy(type(cls)):  # type: ignore[misc]  # what it is is known when it runs
        def mro(self) -> list[type]:
            if cls not in self.__bases__:  # a subclass of the class that is made
                return list(super().mro())
            before = [base for each in first for base in each.__mro__ if base not in cls.__mro__]
            return [self, *dict.fromkeys(before), *cls.__mro__]

    made: type = PrecededBy(name, (cls, *first), namespace)
    return made


def _is_laid_out_by(cls: type) -> type:
    """Return the base of the class from which ``cls`` has the attributes of its objects."""
    base = cls.__base__
    while base is not None and base.__dictoffset__:
        base = base.__base__
    assert base is not None
    return base

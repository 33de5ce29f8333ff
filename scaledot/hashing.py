"""Frozen dataclasses that hash once: problems and formats are looked up in every eager call."""

from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)


def hash_once(cls: Class) -> Class:
    """A frozen dataclass whose objects remember their hash. It is not pickled: another process hashes differently."""
    compute: Any = cls.__hash__

    def remembered(self) -> int:
        known = self.__dict__.get("_hash")
        if known is None:
            known = self.__dict__["_hash"] = compute(self)
        return known

    def without_hash(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    cls.__hash__ = remembered  # pyright: ignore[reportAttributeAccessIssue]
    cls.__getstate__ = without_hash  # pyright: ignore[reportAttributeAccessIssue]
    return cls

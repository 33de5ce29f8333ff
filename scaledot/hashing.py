"""Cached hashes of frozen dataclasses, which are keys of look-ups in every eager call."""

from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)


def hash_once(cls: Class) -> Class:
    """Class decorator that caches the hash of frozen dataclass instances; the hash is not pickled."""
    compute: Any = cls.__hash__

    def cached_hash(self) -> int:
        cached = self.__dict__.get("_hash")
        if cached is None:
            cached = self.__dict__["_hash"] = compute(self)
        return cached

    def state_without_hash(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    cls.__hash__ = cached_hash  # pyright: ignore[reportAttributeAccessIssue]
    cls.__getstate__ = state_without_hash  # pyright: ignore[reportAttributeAccessIssue]
    return cls

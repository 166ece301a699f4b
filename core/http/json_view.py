"""The JSON side of a struct type that also travels as msgpack: what a JSON schema can say about it.

str | bytes            text in JSON, bytes in msgpack: here `str`
X | UnsetType          may be left out: here with a default, so that no schema calls it required
A | B  (structs)       one or the other, told apart by their fields: here a class of its own, `EitherOf`
"""

from __future__ import annotations

import types
from functools import cache, reduce
from operator import or_
from typing import Any, Union, get_args, get_origin

import msgspec
from msgspec import UNSET, UnsetType


class EitherOf:
    """Base of what stands for a union of structs without a tag, of which msgspec makes no schema. `members`: those."""

    members: tuple[type[msgspec.Struct], ...] = ()


@cache
def json_view(shape: Any) -> Any:
    """`shape` itself where nothing differs, else a struct type (or a type of such) of the same name and docstring."""
    origin, arguments = get_origin(shape), get_args(shape)
    if origin in {Union, types.UnionType}:
        members = [json_view(member) for member in arguments]
        structs = tuple(member for member in members if _is_struct(member))
        if len(structs) > 1:
            either = type(
                "EitherOf" + "Or".join(struct.__name__ for struct in structs), (EitherOf,), {"members": structs}
            )
            members = [either, *(member for member in members if member not in structs)]
        kept = [member for member in members if member is not bytes or str not in members]
        return reduce(or_, kept)
    if origin in {list, dict, tuple}:
        return origin[tuple(argument if argument is ... else json_view(argument) for argument in arguments)]
    if _is_struct(shape):
        return _struct_view(shape)
    return shape


def _is_struct(shape: Any) -> bool:
    return isinstance(shape, type) and issubclass(shape, msgspec.Struct)


def _struct_view(shape: type[msgspec.Struct]) -> type[msgspec.Struct]:
    fields: list[Any] = []
    differs = False
    for field in msgspec.structs.fields(shape):
        seen = json_view(field.type)
        may_lack = field.required and UnsetType in get_args(seen)
        differs = differs or may_lack or seen != field.type
        if may_lack:
            fields.append((field.name, seen, UNSET))
        elif field.required:
            fields.append((field.name, seen))
        elif field.default_factory is not msgspec.NODEFAULT:
            fields.append((field.name, seen, msgspec.field(default_factory=field.default_factory)))
        else:
            fields.append((field.name, seen, field.default))
    if not differs:
        return shape
    config = shape.__struct_config__
    names = {field.name: field.encode_name for field in msgspec.structs.fields(shape)}
    return msgspec.defstruct(
        shape.__name__,
        fields,
        module=shape.__module__,
        namespace={"__doc__": shape.__doc__},
        rename=names,
        kw_only=True,
        frozen=True,
        forbid_unknown_fields=config.forbid_unknown_fields,
    )

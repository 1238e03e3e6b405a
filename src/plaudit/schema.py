"""Configuration machinery: strict, frozen schemas, read from TOML and ``key=value``, checked before anything is built.

What the keys are stands elsewhere (see config); this module knows how they are read, merged, listed and refused.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from plaudit.errors import ConfigError

C = TypeVar("C", bound="Frozen")


class Frozen(BaseModel):
    """Base of every configuration: unknown keys are errors, values are not coerced, nothing changes after reading."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def rebased(self, data: dict[str, Any]) -> Self:
        """These defaults as the user's own keys ``data`` make them: a key may bring the defaults of others with it."""
        return self


def leaves(schema: type[Frozen], prefix: str = "") -> Iterator[tuple[str, str, Any, str]]:
    """Every key of a configuration: dotted name, type, default, description."""
    yield from _leaves(schema, schema(), prefix)


def _leaves(schema: type[Frozen], default: Frozen, prefix: str) -> Iterator[tuple[str, str, Any, str]]:
    for name, info in schema.model_fields.items():
        value = getattr(default, name)
        if isinstance(value, Frozen):
            yield from _leaves(type(value), value, f"{prefix}{name}.")
        else:
            choices = get_args(info.annotation)
            kind = (
                " | ".join(map(str, choices)) if choices and not isinstance(choices[0], type) else type(value).__name__
            )
            yield f"{prefix}{name}", kind, value, info.description or _inherited(schema, name)


def _inherited(schema: type[Frozen], name: str) -> str:
    for base in schema.__mro__:
        fields = getattr(base, "model_fields", {})
        if name in fields and fields[name].description:
            return str(fields[name].description)
    return ""


def parse_override(text: str) -> tuple[list[str], Any]:
    """``a.b=value`` as (["a", "b"], value). The value is read as TOML; what is not TOML is a string.

    Raises:
        ConfigError: there is no "=".
    """
    key, equals, raw = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{text!r} is no override; write key=value, for example seed=1")
    try:
        value = tomllib.loads(f"v = {raw}")["v"]
    except tomllib.TOMLDecodeError:
        value = raw
    return key.strip().split("."), value


def read(schema: type[C], file: str | Path | None = None, overrides: Sequence[str] = ()) -> C:
    """The configuration in a TOML file, with overrides applied.

    Raises:
        ConfigError: the file is missing or no TOML, a key is unknown (the nearest is named), a value is out of range.
    """
    data: dict[str, Any] = {}
    if file is not None:
        try:
            data = tomllib.loads(Path(file).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{file}: no such file; recipes/ holds one for every command") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: cannot be read as a configuration: {error}") from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{file}: not valid TOML: {error}") from None
    for text in overrides:
        path, value = parse_override(text)
        _set(data, path, value, text)
    return build(schema, data, str(file) if file is not None else "command line")


def _set(data: dict[str, Any], path: list[str], value: Any, text: str) -> None:
    for part in path[:-1]:
        data = data.setdefault(part, {})
        if not isinstance(data, dict):
            raise ConfigError(f"{text}: {part} is a value, not a section")
    data[path[-1]] = value


def build(schema: type[C], data: dict[str, Any], source: str = "configuration") -> C:
    """A configuration from nested dictionaries; missing keys take the schema's defaults, also inside sections.

    Raises:
        ConfigError: as for :func:`read`.
    """
    try:
        return schema.model_validate(_merge(schema(), data, source))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            # inside a list, where no default could be merged before
            section, key = _section(schema, first["loc"][:-1]), str(first["loc"][-1])
            raise ConfigError(
                f"{source}: unknown key {where!r}{_advice(section, where.removesuffix(key), key)}"
            ) from None
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "list_type":
            message = f'write a list, for example {where}=["…"]; {message}'
        got = f", not {first['input']!r}" if where and not isinstance(first["input"], dict) else ""
        raise ConfigError(f"{source}: {where + ': ' if where else ''}{message[0].lower()}{message[1:]}{got}") from None


def _section(schema: type[Frozen], loc: tuple[int | str, ...]) -> type[Frozen]:
    """The schema of the section at a path that may go through lists."""
    for part in loc:
        if isinstance(part, str):
            annotation = schema.model_fields[part].annotation
            inner = get_args(annotation)[0] if get_args(annotation) else annotation
            assert isinstance(inner, type) and issubclass(inner, Frozen)
            schema = inner
    return schema


def _merge(default: Frozen, data: dict[str, Any], source: str, prefix: str = "") -> dict[str, Any]:
    default = default.rebased(data)
    merged = {name: getattr(default, name) for name in type(default).model_fields}
    for key, value in data.items():
        if key not in merged:
            raise ConfigError(f"{source}: unknown key {prefix + key!r}{_advice(type(default), prefix, key)}")
        if isinstance(merged[key], Frozen):
            if not isinstance(value, dict):
                raise ConfigError(
                    f"{source}: {prefix + key} is a section; set its keys, "
                    f"for example {_example(prefix + key, merged[key])}"
                )
            merged[key] = _merge(merged[key], value, source, f"{prefix}{key}.")
        else:
            merged[key] = value
    return {k: v.model_dump() if isinstance(v, Frozen) else v for k, v in merged.items()}


def overlaid(base: C, keys: dict[str, Any]) -> C:
    """``base`` with nested keys replaced; sections keep the keys that are not named. Nothing is checked here."""
    changes = {
        name: overlaid(getattr(base, name), value) if isinstance(getattr(base, name), Frozen) else value
        for name, value in keys.items()
    }
    return base.model_copy(update=changes)


def _example(prefix: str, section: Frozen) -> str:
    name = next(iter(type(section).model_fields))
    return f"{prefix}.{name}={getattr(section, name)}"


def _advice(schema: type[Frozen], prefix: str, key: str) -> str:
    names = {name: prefix + name for name, *_ in leaves(schema)}
    last: dict[str, str] = {}
    for name, full in names.items():
        last.setdefault(name.rsplit(".", 1)[-1], full)
    sections = {name: prefix + name for name in schema.model_fields if name not in names}
    candidates = last | names | sections
    near = difflib.get_close_matches(key, candidates, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {candidates[near[0]]!r}?"
    return f"; known here: {', '.join(sorted(schema.model_fields))}"


def dump(config: Frozen) -> dict[str, Any]:
    """The resolved configuration as plain JSON types."""
    return config.model_dump(mode="json")

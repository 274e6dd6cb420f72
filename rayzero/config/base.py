"""The base of every config: frozen, checked when it is made, one-line errors, read from YAML and written as YAML."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from rayzero.config.text import Settings, Takes, Unit, describe_fields, dump_yaml, load_yaml
from rayzero.errors import ConfigError
from rayzero.quantities import BYTE_TEXT, parse_bytes
from rayzero.records import fault_of

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

Flag = Annotated[bool, Strict()]
Count = Annotated[int, Strict(), Field(gt=0, le=10**9)]  # tensors and schedules cannot be that large
Natural = Annotated[int, Strict(), Field(ge=0, le=10**9)]  # what Ray counts, and the kernel sleeps, has an end
Processes = Annotated[int, Strict(), Field(gt=0, le=1 << 14)]  # Ray itself is tested with 40,000 actors
Spares = Annotated[int, Strict(), Field(ge=0, le=8)]
Size = Annotated[
    int,
    BeforeValidator(parse_bytes),
    Strict(),
    Field(gt=0, le=1 << 62),
    Unit("bytes"),
    Takes("int | str"),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "exclusiveMinimum": 0}, {"type": "string", "pattern": BYTE_TEXT.pattern}]}
    ),
]
Mebibytes = Annotated[int, Strict(), Field(gt=0, le=1 << 42), Unit("MiB")]
Share = Annotated[float, Strict(), Field(ge=0, le=1), Unit("0 to 1")]
Positive = Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Strict(), Field(gt=0, le=10**9, allow_inf_nan=False), Unit("seconds")]  # a lock's has an end
WholeSeconds = Annotated[Natural, Unit("seconds")]  # 0 too


def _names(value: object) -> object:
    if isinstance(value, str):
        return value if value == "auto" else (value,)
    names = tuple(value) if isinstance(value, list | tuple) else (None,)
    if all(isinstance(name, str) and name for name in names):
        return names
    raise ValueError("must be a list of names")


Names = Annotated[tuple[str, ...], BeforeValidator(_names), Takes("str | Sequence[str]")]  # or one name


Text = Annotated[str, Field(min_length=1)]
PathText = Annotated[
    Text, BeforeValidator(lambda value: str(value) if isinstance(value, Path) else value), Takes("str | Path")
]


# ---- one-line errors --------------------------------------------------------------------------------------------


def _unknown_key(model: type[BaseModel], key: str, value: object) -> str:
    names = {name.rpartition(".")[2]: name for name in _dotted(model)} | {name: name for name in model.model_fields}
    near = difflib.get_close_matches(key, names, n=1)
    hint = f"did you mean {names[near[0]]!r}?" if near else f"settings are {', '.join(model.model_fields)}"
    return f"{model.__name__}: unknown setting {key!r} = {reprlib.repr(value)}; {hint}"


def _dotted(model: type[BaseModel], group: str = "") -> Iterator[str]:
    """The names of the settings in the groups of a config, with those of their groups."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _dotted(kind, f"{group}{name}.")
        elif group:
            yield f"{group}{name}"


def _one_line(model: type[BaseModel], error: ValidationError) -> str:
    """Describe the first error in one line; unknown settings come before wrong values."""
    for item in error.errors(include_url=False):
        if item["type"] == "extra_forbidden":
            return _unknown_key(model, str(item["loc"][0]), item["input"])
    first = error.errors(include_url=False)[0]
    if isinstance(first.get("ctx", {}).get("error"), ConfigError) and first["loc"]:
        return f"{first['loc'][0]}: {first['ctx']['error']}"
    plain = re.sub(r"a valid dictionary or instance of \w+$", "a group of settings", fault_of(error, depth=1))
    return f"{model.__name__}: {plain}"


class ConfigModel(BaseModel):
    """Base of every config: frozen, without unknown settings, with one-line errors, read from and written as YAML.

    Knows its fields; not where they came from or who reads them."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    if not TYPE_CHECKING:  # type checkers keep the fields' own signature

        def __init__(self, **settings: Any) -> None:
            """Raises a one-line ConfigError for an unknown setting or a wrong value."""
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise ConfigError(" ".join(_one_line(type(self), error).split())) from None

        def __setattr__(self, name: str, value: Any) -> None:
            raise ConfigError(f"{type(self).__name__} is frozen: use .replace({name}=...) for a new one")

    @model_validator(mode="before")
    @classmethod
    def _empty_groups(cls, settings: Any) -> Any:
        """A group of which a YAML file has nothing but comments is null there: all defaults."""
        if not isinstance(settings, Mapping):
            return settings
        kinds = {name: field.annotation for name, field in cls.model_fields.items()}
        groups = {name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, ConfigModel)}
        return {name: value for name, value in settings.items() if value is not None or name not in groups}

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Make ``help()`` show a line for each setting, instead of pydantic's annotations."""
        cls.__doc__ = f"{cls.__doc__}\n\nSettings:\n\n" + "\n".join(f"    {line}" for line in describe_fields(cls))
        cls.__signature__ = Settings.of(cls.__signature__)

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> Self:
        """Make a config from plain values, as YAML gives them. Raises ConfigError."""
        if not isinstance(settings, Mapping) or not all(isinstance(key, str) for key in settings):
            raise ConfigError(f"{cls.__name__}: settings must be a mapping of names, got {reprlib.repr(settings)}")
        return cls(**settings)

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        """Make a config from YAML text: a mapping, or nothing for all defaults. Raises ConfigError."""
        return cls.from_mapping(load_yaml(text, source=cls.__name__))

    def to_yaml(self) -> str:
        """YAML text with every setting, from which ``from_yaml`` makes an equal config."""
        return dump_yaml(self.model_dump(mode="json"))

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """JSON schema of the YAML form, for editors."""
        schema = cls.model_json_schema()
        for one in (schema, *schema.get("$defs", {}).values()):
            one["description"] = one.get("description", "").partition("\n\nSettings:")[0]
        return schema

    def replace(self, **changes: Any) -> Self:
        """A new config with some settings changed. It is checked like any other: raises ConfigError."""
        return type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | changes)

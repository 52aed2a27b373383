"""What every part of the resource shares: names in camel case, nothing unknown, CEL rules in the schema."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class Rule(dict[str, str]):
    """One x-kubernetes-validations entry."""

    def __init__(self, rule: str, message: str, field_path: str | None = None) -> None:
        super().__init__(rule=rule, message=message)
        if field_path is not None:
            self["fieldPath"] = field_path


def rules(*entries: Rule) -> dict[str, Any]:
    return {"x-kubernetes-validations": [dict(entry) for entry in entries]}


def config(**extra: Any) -> ConfigDict:
    return ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True, json_schema_extra=extra or None
    )


class Base(BaseModel):
    model_config = config()

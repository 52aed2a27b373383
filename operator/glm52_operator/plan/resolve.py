"""From the object as stored to a Target, or to the reason why it cannot be one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from glm52_operator import names
from glm52_operator.api.spec import Spec
from glm52_operator.desired.config import engine_config
from glm52_operator.desired.target import Target

SHOWN_LIMIT = 60
"""Characters of a wrong value that a message repeats."""


@dataclass(frozen=True, slots=True)
class Invalid:
    """A specification that cannot be applied; the message names field, value and remedy."""

    reason: str
    message: str


def resolve(resource: dict[str, Any], default_image: str | None) -> Target | Invalid:
    """Read a GLM52Deployment. The API server has checked the schema, but perhaps an older or a newer one than ours."""
    meta = resource["metadata"]
    if len(meta["name"]) > names.MAX_NAME:
        return Invalid(
            "NameTooLong",
            f"metadata.name: {meta['name']!r} has {len(meta['name'])} characters, the derived names leave room for "
            f"{names.MAX_NAME}. Create the object again under a shorter name.",
        )
    try:
        spec = Spec.model_validate(resource.get("spec", {}))
    except ValidationError as error:
        return Invalid("InvalidSpec", _sentence(explain(error, "spec")))
    image = spec.image or default_image
    if not image:
        return Invalid(
            "ImageMissing",
            "spec.image: is not set and the operator was started without --engine-image. Set spec.image, or install "
            "the "
            "operator with an engine image (chart value engineImage).",
        )
    target = Target(name=meta["name"], namespace=meta["namespace"], uid=meta["uid"], spec=spec, image=image)
    try:
        for component in (*names.ROLES, names.ROUTER):
            engine_config(target, component)
    except ValidationError as error:
        return Invalid("InvalidSpec", _sentence(explain(error, "engine configuration")))
    return target


def explain(error: ValidationError, root: str = "") -> list[str]:
    """Each fault of a validation: path, expectation, what was found, remedy."""
    parts = []
    for item in error.errors():
        path = ".".join([*([root] if root else []), *(str(part) for part in item["loc"])])
        if item["type"] == "extra_forbidden":
            parts.append(
                f"{path}: this operator does not know the field. Remove it, or install the operator that belongs to "
                "the CRD"
            )
        elif item["type"] == "missing":
            parts.append(f"{path}: must be set. Set it, or apply the CRD that belongs to this operator")
        else:
            parts.append(f"{path}: {item['msg']} (found {shown(item['input'])}). Correct it and apply again")
    return parts


def shown(value: object) -> str:
    """A value for a message, however large it is."""
    text = repr(value)
    return text if len(text) <= SHOWN_LIMIT else f"{text[: SHOWN_LIMIT - 1]}…"


def _sentence(parts: list[str]) -> str:
    return "; ".join(parts) + "."

"""GLM52Deployment as a pydantic model: source of the CRD, and what the operator reads objects through."""

from __future__ import annotations

from pydantic import BaseModel, Field

from glm52_operator import names
from glm52_operator.api.base import Rule, config, rules
from glm52_operator.api.spec import Spec
from glm52_operator.api.status import Status


class GLM52Deployment(BaseModel):
    """GLM-5.2 served with prefill and decode in separate pods behind one OpenAI-compatible router."""

    model_config = config(
        **rules(
            Rule(
                f"self.metadata.name.size() <= {names.MAX_NAME}",
                f"metadata.name must be at most {names.MAX_NAME} characters: the names and labels of the "
                "StatefulSets, Services "
                "and pods are made from it and may not pass 63",
            ),
            Rule(
                "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
                "metadata.name must be a DNS label that starts with a letter (lower case letters, digits and '-', no "
                "dots): "
                "Services are named after it",
            ),
        )
    )

    spec: Spec = Field(description="Desired state.")
    status: Status | None = Field(default=None, description="Observed state; written by the operator.")

"""Errors in OpenAI's shape, with true status codes. No torch, no web framework: engine pods and the router share it."""

from __future__ import annotations

import json
from typing import Any

RETRY_AFTER_SECONDS = 2

KV_MISMATCH = "kv_mismatch"
"""Code of decode's refusal of KV that it cannot read; one of another model may."""

DRAINING = "draining"
"""Code with which a pod that goes sends on what waited in it. Where no other pod is, the request may come back to it;
new ones may not, or a drain under steady traffic would last until its window is over and cut off what runs then."""


class ApiError(Exception):
    """What the client gets instead of an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.allow = ""

    @property
    def kind(self) -> str:
        if self.status == 401:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, Any]:
        fields = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": fields}

    def encode(self) -> bytes:
        return json.dumps(self.body(), ensure_ascii=False).encode()

    def event(self) -> bytes:
        """As the last event of a stream that has begun; no [DONE] follows it."""
        return b"data: " + self.encode() + b"\n\n"

    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        return {**headers, "allow": self.allow} if self.allow else headers


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str | None = None) -> ApiError:
    return ApiError(503, message, code=code, retry_after=RETRY_AFTER_SECONDS)


def no_number() -> ApiError:
    return ApiError(500, "the model's numbers for this request are none; other requests go on", code="not_a_number")


def no_route(method: str, path: str) -> ApiError:
    return ApiError(404, f"there is no {method} {path}", code="unknown_url")


def wrong_method(method: str, path: str, allowed: str) -> ApiError:
    """`allowed`: what the Allow header lists, which a 405 must have."""
    error = ApiError(405, f"{path} does not take {method}, only {allowed}", code="method_not_allowed")
    error.allow = allowed
    return error

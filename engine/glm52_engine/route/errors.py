"""Whatever goes wrong while the router answers → an answer in OpenAI's shape."""

from __future__ import annotations

import logging

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from glm52_engine.lifecycle.life import Refused
from glm52_engine.route.legs import Relayed
from glm52_engine.serve.errors import ApiError, bad, no_route, unavailable, wrong_method
from glm52_engine.serve.fields import MAX_BODY_BYTES

log = logging.getLogger(__name__)


def as_answer(error: Exception, request: web.Request) -> web.Response:
    """Anything unforeseen is a 500 here, and a traceback in the log."""
    if isinstance(error, Relayed):
        return web.Response(
            status=error.status, body=error.body, content_type="application/json", headers=error.headers
        )
    told = _told(error, request)
    return web.Response(status=told.status, body=told.encode(), content_type="application/json", headers=told.headers())


def _told(error: Exception, request: web.Request) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Refused):
        return unavailable(f"this router takes no requests: {error}", "not_ready")
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return ApiError(413, f"the body is longer than {MAX_BODY_BYTES} bytes", code="body_too_large")
    if isinstance(error, web.HTTPMethodNotAllowed):
        return wrong_method(request.method, request.path, ", ".join(sorted(error.allowed_methods)))
    if isinstance(error, web.HTTPException):
        return no_route(request.method, request.path) if error.status == 404 else ApiError(error.status, error.reason)
    if isinstance(error, web.RequestPayloadError | BadHttpMessage):
        # A wrong content-encoding or chunk length: the body cannot be had.
        return bad(f"the body cannot be read: {' '.join(str(error).split())}")
    log.error("request failed", exc_info=error)
    return ApiError(500, "the router failed on this request; its log has the reason", code="internal_error")

"""An engine pod that stops itself in the middle of a call: `python frozen_pod.py head | stream | whole`."""

from __future__ import annotations

import os
import signal
import sys

from aiohttp import web


async def alive(request: web.Request) -> web.Response:
    return web.json_response({})


async def call(request: web.Request) -> web.StreamResponse:
    if request.match_info["call"] == "early" or request.match_info["call"].startswith("kv/"):
        return web.json_response({})
    if sys.argv[1] == "head":
        os.kill(os.getpid(), signal.SIGSTOP)
    kind = "text/event-stream" if sys.argv[1] == "stream" else "application/json"
    response = web.StreamResponse(headers={"content-type": kind})
    await response.prepare(request)
    await response.write(b'data: {"choices": []}\n\n')
    os.kill(os.getpid(), signal.SIGSTOP)
    return response


def main() -> None:
    app = web.Application()
    app.router.add_get("/readyz", alive)
    app.router.add_get("/livez", alive)
    app.router.add_post("/internal/v1/{call:.*}", call)
    web.run_app(app, host="127.0.0.1", port=0, print=lambda words: print(words, flush=True))


if __name__ == "__main__":
    main()

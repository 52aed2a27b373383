"""Run the operator."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys

from glm52_operator import names
from glm52_operator.reconcile.client import Api
from glm52_operator.reconcile.operator import Operator
from glm52_operator.settings import Settings


def run(arguments: argparse.Namespace) -> int:
    configure_logging(verbose=arguments.verbose)
    # kopf asks for the user's name, and the uid of a container has no entry in /etc/passwd.
    os.environ.setdefault("LOGNAME", names.MANAGER)
    settings = Settings(
        engine_image=arguments.engine_image,
        namespaces=tuple(dict.fromkeys(arguments.namespace)),
        health_host=arguments.health_host,
        health_port=arguments.health_port,
        lease=arguments.lease,
        identity=arguments.identity,
    )
    asyncio.run(_run(settings))
    return 1


async def _run(settings: Settings) -> None:
    code = await Operator(settings, await Api.connect(settings.identity)).run()
    # Everything of ours is closed. After a failed watch some of kopf's streams ignore their cancellation, and the event
    # loop would wait for them for ever instead of ending the process.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def configure_logging(*, verbose: bool) -> None:
    logging.basicConfig(
        stream=sys.stdout,
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    # kopf logs every event of every object at INFO.
    logging.getLogger("kopf").setLevel(logging.INFO if verbose else logging.WARNING)
    logging.getLogger("aiohttp").setLevel(logging.WARNING)

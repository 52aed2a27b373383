"""The running operator: lists, watches, workers and the health server, and how they end together."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import signal
from collections.abc import Awaitable

import aiohttp
import kopf
from aiohttp import web

from glm52_operator import names
from glm52_operator.desired.target import Object
from glm52_operator.plan.events import Notice
from glm52_operator.plan.failures import grant
from glm52_operator.plan.permissions import missing
from glm52_operator.reconcile import listen, paths, watch
from glm52_operator.reconcile.apply import Applier
from glm52_operator.reconcile.client import MANAGED_SELECTOR, Api, ApiError
from glm52_operator.reconcile.clock import LoopClock
from glm52_operator.reconcile.events import Recorder
from glm52_operator.reconcile.health import Health, application
from glm52_operator.reconcile.kinds import DEPLOYMENT_RESOURCE, WATCHED, Kind
from glm52_operator.reconcile.lease import Alone, Leadership, Lease
from glm52_operator.reconcile.listen import Listener, over_http
from glm52_operator.reconcile.metrics import BROKEN, FAILED, SETTLED, WAITING, Metrics
from glm52_operator.reconcile.queue import WorkQueue
from glm52_operator.reconcile.reconciler import Reconciler, is_complete
from glm52_operator.reconcile.store import Key, Store
from glm52_operator.settings import Settings

log = logging.getLogger("glm52.operator")

DRAIN_SECONDS = 3.0
"""What a pass that runs gets to finish after TERM; a cut one is repeated by the next operator."""

WATCH_END_SECONDS = 1.0

WORKER = "worker-"

FIRST_RETRY_SECONDS = 2.0

RELIST_SECONDS = 5.0
"""After which a list that a watch began anew with is over, and another one shows what is gone."""


class Operator:
    def __init__(self, settings: Settings, api: Api) -> None:
        self.clock = clock = LoopClock()
        self.settings = settings
        self.api = api
        self.store = Store()
        self.queue: WorkQueue[Key] = WorkQueue(clock)
        self.health = Health(clock, self.queue, scoped=bool(settings.namespaces))
        self.metrics = Metrics(self.queue, self.store)
        api.on_answer = self.metrics.answered
        self._http = aiohttp.ClientSession()
        self.listener = Listener(clock, over_http(self._http, listen.read), self.queue.add)
        self.paths = paths.Paths(clock, over_http(self._http, paths.read), self._tell)
        self.reconciler = Reconciler(
            api=api,
            store=self.store,
            applier=Applier(api, self.store, clock),
            recorder=Recorder(api, _utcnow),
            default_image=settings.engine_image,
            utcnow=_utcnow,
            tally=self.metrics.written,
            listener=self.listener,
            follow_paths=self.paths.follow,
        )
        api.on_written = self._written
        self._relists = watch.Relists(clock, self._restarted, scoped=bool(settings.namespaces))
        self._lacking: set[tuple[str, str]] = set()
        """What was told of missing permissions."""
        self._listing: dict[Kind, asyncio.Task[None]] = {}
        self._one_list = asyncio.Lock()
        self.leadership = _leadership(settings, api, clock)
        api.may_write = self.leadership.is_held
        self._leading = asyncio.Event()
        self.stop = asyncio.Event()
        self._broken = False

    async def run(self) -> int:
        """Until TERM: 0; until a part of it breaks: 1."""
        self._take_signals()
        server = await self._serve_health()
        tasks: list[asyncio.Task[None]] = []
        try:
            # A standby lists and watches like the one that acts, so that it can go on at once.
            tasks.append(self._spawn(self._lead(), "lease"))
            if await self._first_list():
                tasks += [self._spawn(self._work(), f"{WORKER}{number}") for number in range(self.settings.workers)]
                await self._watch()
        finally:
            await self._finish([*tasks, *self._listing.values()])
            await self.leadership.release()
            await server.cleanup()
            await self.listener.close()
            await self.paths.close()
            await self._http.close()
            await self.api.close()
        return 1 if self._broken else 0

    async def _watch(self) -> None:
        """Until the stop flag is set or a part of kopf ends.

        kopf's own run_tasks is not used: when a watch fails for good it waits for ever for the other tasks, and the
        process lives on without hearing anything.
        """
        tasks = await kopf.spawn_tasks(
            registry=watch.registry(self.store, self.queue, self.health, self._relists),
            settings=watch.settings(),
            clusterwide=not self.settings.namespaces,
            namespaces=self.settings.namespaces,
            stop_flag=self.stop,
        )
        self._take_signals()
        # What was deleted between the first list and kopf's own is in neither, and no event will ever tell of it.
        for kind in WATCHED:
            again = self._list_again(kind, watch.FIRST_LIST_SECONDS)
            self._listing[kind] = self._spawn(again, f"list-{kind.plural}")
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not self.stop.is_set():
            names = ", ".join(task.get_name() for task in done)
            log.error("the watches ended (%s); the operator ends, to be started again", names)
            for error in (task.exception() for task in done if not task.cancelled()):
                if error is not None:
                    log.error("%s. %s", error, grant(str(error), "watch", "") if "cannot watch" in str(error) else "")
            self._broken = True
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=WATCH_END_SECONDS)

    def _take_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._end)

    def _end(self) -> None:
        # Workers finish what they have begun while the watches are taken down.
        self.queue.close()
        self.stop.set()

    async def _serve_health(self) -> web.AppRunner:
        served = application(self.health, self.metrics.text)
        runner = web.AppRunner(served, access_log=None, handle_signals=False, shutdown_timeout=0.5)
        await runner.setup()
        await web.TCPSite(runner, self.settings.health_host, self.settings.health_port).start()
        return runner

    def _written(self, kind: Kind, obj: Object) -> None:
        if kind in WATCHED:
            self.health.wrote(kind, obj)

    async def _tell(self, key: Key, notices: list[Notice]) -> None:
        """What was learnt beside the passes."""
        resource = self.store.get(DEPLOYMENT_RESOURCE, *key)
        if resource is not None:
            await self.reconciler.recorder.record(resource, notices)

    def _restarted(self, kind: Kind) -> None:
        """Said of every item of a list; one list of our own is enough, and it comes after the last of them."""
        if kind not in self._listing:
            log.info("the watch of %s began anew with a list", kind.plural)
            self.metrics.watch_restarts.labels(kind.kind).inc()
            self._listing[kind] = self._spawn(self._list_again(kind), f"list-{kind.plural}")

    async def _list_again(self, kind: Kind, seconds: float = RELIST_SECONDS) -> None:
        await asyncio.sleep(seconds)
        try:
            # One after the other: all kinds are due together after a start, and after an API server was away.
            async with self._one_list:
                del self._listing[kind]
                concerned = await self._list(kind)
        except ApiError as error:
            log.error("%s", _explain(error))
            self._restarted(kind)
            return
        for key in concerned:
            self.queue.add(key)

    def _spawn(self, work: Awaitable[None], name: str) -> asyncio.Task[None]:
        """A task that breaks takes the process down, instead of leaving half an operator."""

        async def guarded() -> None:
            try:
                await work
            except asyncio.CancelledError:
                raise
            except BaseException:
                log.exception("%s broke; the operator ends", name)
                self._broken = True
                self.stop.set()

        return asyncio.create_task(guarded(), name=name)

    async def _finish(self, tasks: list[asyncio.Task[None]]) -> None:
        self.queue.close()
        workers = [task for task in tasks if task.get_name().startswith(WORKER)]
        # The lease is kept while a pass that has begun is finished.
        acting = self._leading.is_set() and self.leadership.is_held()
        if workers and acting:
            await asyncio.wait(workers, timeout=DRAIN_SECONDS)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _lead(self) -> None:
        await self.leadership.acquire()
        self._leading.set()
        self.metrics.leading.set(1)
        reason = await self.leadership.keep()
        # Nothing is finished first: from now on somebody else acts.
        log.error("%s; the operator ends, to be started again", reason)
        self._broken = True
        self._end()

    async def _work(self) -> None:
        await self._leading.wait()
        while (key := await self.queue.get()) is not None:
            began = self.clock.now()
            result = await self._pass(key)
            self.metrics.passes.labels(result).observe(self.clock.now() - began)

    async def _pass(self, key: Key) -> str:
        try:
            result = await self.reconciler.reconcile(key, self.queue.failures(key))
        except Exception:
            # A bug in one deployment's pass must not stop the others; it is retried, and it is loud.
            log.exception("%s/%s: the pass broke", *key)
            self.queue.failed(key)
            return BROKEN
        if result.failed:
            delay = self.queue.failed(key)
            log.debug("%s/%s: next attempt in %.0f s", *key, delay)
            return FAILED
        if result.again:
            self.queue.add(key)
        self.queue.done(key, requeue_after=result.requeue_after)
        return SETTLED if result.requeue_after is None else WAITING

    async def _first_list(self) -> bool:
        """List everything before anything is watched or reconciled; False: told to stop before it worked.

        kopf looks for the kinds it shall watch once, at its start: it must not start before the CRD is there.
        """
        while not self.stop.is_set():
            if await self._list_all():
                await self._tell_what_is_missing()
                self.health.synced = True
                where = ", ".join(self.settings.namespaces) or "all namespaces"
                log.info("serving %s; %d deployments", where, len(self.store.deployments()))
                for key in sorted(self.store.deployments(), key=self._is_settled):
                    self.queue.add(key)
                return True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stop.wait(), FIRST_RETRY_SECONDS)
        return False

    def _is_settled(self, key: Key) -> bool:
        """Deployments that changed while no operator ran come first."""
        resource = self.store.get(DEPLOYMENT_RESOURCE, *key) or {}
        return is_complete(resource)

    async def _tell_what_is_missing(self) -> None:
        """Every permission that is missing, at once and before anything depends on it; what then fails says so, too."""
        for namespace in self.settings.namespaces or ("default",):
            try:
                rules, complete = await self.api.own_rules(namespace)
            except ApiError as error:
                log.info("not known what the operator may do: %s", error)
                return
            # An API server with an authorizer of its own may allow more than it can list.
            for sentence in missing(rules) if complete else ():
                where = namespace if self.settings.namespaces else "the whole cluster"
                if (where, sentence) not in self._lacking:
                    self._lacking.add((where, sentence))
                    log.error("in %s %s", where, sentence)

    async def _list_all(self) -> bool:
        try:
            # One after the other: a page is many times larger while it is parsed than what is kept of it.
            for kind in WATCHED:
                await self._list(kind)
        except ApiError as error:
            log.error("%s", _explain(error))
            if error.code == 403:
                await self._tell_what_is_missing()
            return False
        return True

    async def _list(self, kind: Kind) -> set[Key]:
        """Replace what is known of a kind; the deployments that are concerned."""
        concerned: set[Key] = set()
        labels = None if kind is DEPLOYMENT_RESOURCE else MANAGED_SELECTOR
        for namespace in self.settings.scopes:
            with self.store.listing(kind, namespace) as listing:
                _, version = await self.api.list(kind, namespace, labels=labels, keep=listing.take)
                concerned |= listing.end(version)
        return concerned


def _leadership(settings: Settings, api: Api, clock: LoopClock) -> Leadership:
    if settings.lease is None:
        return Alone()
    namespace, name = settings.lease
    return Lease(api, clock, _utcnow, namespace=namespace, name=name, me=settings.identity)


def _utcnow() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _explain(error: ApiError) -> str:
    if error.code == 404 and error.kind is DEPLOYMENT_RESOURCE:
        return f"the API server does not know {names.CRD_NAME}: apply the CRD that comes with this operator"
    if error.code in (401, 403):
        return f"{error}. {grant(error.text, error.verb, error.resource)}"
    return str(error)

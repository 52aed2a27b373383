"""The operator's own lists: one at a time, and no more of one than a page unpacked."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from glm52_operator.reconcile.client import Api, ApiError
from glm52_operator.reconcile.kinds import POD, WATCHED, Kind
from glm52_operator.reconcile.operator import Operator
from glm52_operator.settings import Settings
from tests.operator.builders import pod
from tests.operator.fake_api import FakeApi


class Page:
    """An answer to a list: three objects, and the way to the next page."""

    status = 200

    def __init__(self, number: int, of: int) -> None:
        more = {"continue": str(number + 1)} if number + 1 < of else {}
        items = [{**pod(f"p-{number}-{n}"), "kind": "Pod"} for n in range(3)]
        self._text = json.dumps({"metadata": {"resourceVersion": "9", **more}, "items": items})

    async def read(self) -> bytes:
        return self._text.encode()


async def test_what_a_page_brings_is_packed_before_the_next_one_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[int] = []

    async def answer(method: str, path: str, query: list[tuple[str, str]], *_: Any) -> Page:
        known.append(len(list(operator.store.owned(POD, ("ns", "chat")))))
        return Page(int(dict(query).get("continue", 0)), of=3)

    class Client:
        user_agent = ""

    api = Api(Client())  # type: ignore[arg-type]
    monkeypatch.setattr(api, "_open", answer)
    operator = Operator(Settings(), api)
    assert await operator._list(POD) == {("ns", "chat")}
    assert known == [0, 3, 6]
    assert len(list(operator.store.owned(POD, ("ns", "chat")))) == 9
    await operator._http.close()


async def test_lists_that_fall_due_together_come_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kinds are listed again some seconds after a start: at once they are what takes most memory."""
    running: set[Kind] = set()
    most, failed = 0, False

    class SlowApi(FakeApi):
        async def list(self, kind: Kind, namespace: str | None, **more: Any) -> Any:
            nonlocal most, failed
            running.add(kind)
            most = max(most, len(running))
            await asyncio.sleep(0)
            running.remove(kind)
            if kind is POD and not failed:
                failed = True
                raise ApiError(code=500, text="no", verb="list", kind=kind, name="")
            return await super().list(kind, namespace, **more)

    api = SlowApi()
    api.put(POD, pod("chat-decode-0"))
    operator = Operator(Settings(), api)  # type: ignore[arg-type]
    monkeypatch.setattr(Operator._list_again, "__defaults__", (0.0,))
    spawn, tasks = operator._spawn, []

    def spawned(work: Any, name: str) -> asyncio.Task[None]:
        tasks.append(spawn(work, name))
        return tasks[-1]

    monkeypatch.setattr(operator, "_spawn", spawned)
    for kind in WATCHED:
        operator._listing[kind] = operator._spawn(operator._list_again(kind, 0), kind.plural)
    while running_still := [task for task in tasks if not task.done()]:
        await asyncio.wait(running_still)
    assert (most, operator._listing) == (1, {})
    # The one that failed is tried again.
    assert [call[1] for call in api.calls].count("Pod") == 1
    assert operator.store.get(POD, "ns", "chat-decode-0") is not None
    await operator._http.close()

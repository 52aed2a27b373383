"""A leader as a process: brings a replica up, runs what it reads, and says what happens, a JSON object a line.

    in:   {"start": KEY, "rank": R, "seat": S, "blocks": [...], "prompt": [...], "max_tokens": N}   {"abort": KEY, ...}
    out:  {"up": PHASES}   {"key": KEY, "token": ID, "finish": …, "ended": …}   {"failed": REASON}
          {"ahead": [STEPS, …]}, at the end of its input, by rank

It leaves with the exit code and the termination message of a serving pod.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import threading
from dataclasses import asdict
from typing import Any

from glm52_engine.config import ConfigError, Outcome, read_engine_config
from glm52_engine.lifecycle.phases import Phases
from glm52_engine.lifecycle.termination import leave
from glm52_engine.ranks.replica import make_coordinator
from glm52_engine.ranks.spans import RankHost
from glm52_engine.runtime.rank import Event, Running
from glm52_engine.runtime.types import Sampling


def main() -> int:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--config")
    arguments.add_argument("--token-file")
    arguments.add_argument("--rank-host", action="append", default=[])
    arguments.add_argument("--launch-ahead", action="store_true")
    chosen = arguments.parse_args()
    config = read_engine_config(chosen.config)
    hosts = [RankHost.parse(text, config.role("decode").ranks_per_host) for text in chosen.rank_host]
    news: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    replica = make_coordinator(
        config, "decode", hosts, token_file=chosen.token_file, phases=Phases(), say=lambda text: None, debug=True,
        launch_ahead=chosen.launch_ahead,
    )  # fmt: skip
    replica.on_events = _tell
    try:
        replica.bring_up()
    except Exception as error:
        say({"failed": str(error)})
        return leave(
            Outcome.CONFIG_REFUSED if isinstance(error, ConfigError) else Outcome.CRASHED, "decode", str(error)
        )
    say({"up": {host: [asdict(phase) for phase in phases] for host, phases in replica.phases.items()}})
    threading.Thread(target=_read, args=(news,), daemon=True).start()
    while replica.failure is None:
        try:
            line = news.get(timeout=0.05)
        except queue.Empty:
            continue
        if line is None:
            say({"ahead": [counters.steps_ahead for counters in replica.books.counters]})
            replica.stop()
            return leave(Outcome.DRAINED, "decode", "asked to end")
        if "abort" in line:
            replica.abort(line["rank"], line["abort"])
        else:
            sampling = Sampling(line["max_tokens"], temperature=0.0, ignore_eos=True)
            blocks, prompt = tuple(line["blocks"]), tuple(line["prompt"])
            replica.start(line["rank"], Running(line["start"], line["seat"], blocks, prompt, sampling, 0, False))
    say({"failed": str(replica.failure)})
    return leave(Outcome.CRASHED, "decode", str(replica.failure), rank=getattr(replica.failure, "rank", None))


def say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def _tell(events: list[Event]) -> None:
    for event in events:
        token = event.token
        say({"key": event.key, "token": token and token.id, "finish": token and token.finish, "ended": event.ended})


def _read(news: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    for line in sys.stdin:
        news.put(json.loads(line))
    news.put(None)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)

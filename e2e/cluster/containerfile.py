"""Reads the runtime half of a Containerfile, so that no fact about an image stands twice."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from e2e.cluster.errors import Failed


@dataclass
class Containerfile:
    """What of a Containerfile ends up in the image's configuration."""

    user: str = ""
    workdir: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    ports: list[str] = field(default_factory=list)


def read(file: Path) -> Containerfile:
    return parse(file.read_text())


def parse(text: str) -> Containerfile:
    """USER, WORKDIR, ENV, EXPOSE and ENTRYPOINT of the last stage; what builds the image is skipped."""
    result = Containerfile()
    for keyword, rest in _instructions(text):
        if keyword == "FROM":
            result = Containerfile()
        elif keyword == "USER":
            result.user = rest
        elif keyword == "WORKDIR":
            result.workdir = rest
        elif keyword == "EXPOSE":
            result.ports += [port if "/" in port else f"{port}/tcp" for port in rest.split()]
        elif keyword == "ENV":
            for pair in shlex.split(rest):
                name, equals, value = pair.partition("=")
                if not equals:
                    raise Failed(f"ENV {rest}: write it as NAME=VALUE")
                result.env[name] = value
        elif keyword == "ENTRYPOINT":
            result.entrypoint = _exec_form(rest)
    return result


def _exec_form(text: str) -> list[str]:
    try:
        words = json.loads(text)
    except json.JSONDecodeError:
        words = None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        # Through a shell the program would not be process 1 and would never see SIGTERM.
        raise Failed(f'ENTRYPOINT {text}: write it as ["program", "argument"]')
    return words


def _instructions(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    whole = re.sub(r"\\[ \t]*\n", " ", "\n".join(lines))
    found = []
    for line in whole.splitlines():
        keyword, _, rest = line.strip().partition(" ")
        if keyword:
            found.append((keyword.upper(), rest.strip()))
    return found

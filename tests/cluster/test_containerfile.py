"""The Containerfiles are the only place that says how an image runs."""

from __future__ import annotations

import pytest

from e2e.cluster import appimages, containerfile
from e2e.cluster.errors import Failed


def test_reads_what_ends_up_in_the_image() -> None:
    parsed = containerfile.parse(
        """
        FROM base AS build
        USER root
        FROM base
        # a comment
        RUN make \\
         && true
        ENV A=1 B="two words"
        env C=3
        EXPOSE 8000 9000/udp
        WORKDIR /srv
        USER 10001:10001
        ENTRYPOINT ["run", "it"]
        """
    )
    assert parsed.env == {"A": "1", "B": "two words", "C": "3"}
    assert parsed.ports == ["8000/tcp", "9000/udp"]
    assert (parsed.user, parsed.workdir, parsed.entrypoint) == ("10001:10001", "/srv", ["run", "it"])


@pytest.mark.parametrize("text", ["ENTRYPOINT run it", 'ENTRYPOINT {"run": 1}', "ENV NAME value"])
def test_refuses_forms_that_would_not_do_what_they_seem_to(text: str) -> None:
    with pytest.raises(Failed):
        containerfile.parse(text)


@pytest.mark.parametrize("app", appimages.APPS, ids=lambda app: app.name)
def test_ours_run_unprivileged_from_a_read_only_root(app: appimages.App) -> None:
    parsed = containerfile.read(app.containerfile)
    assert parsed.user == "10001:10001"
    assert parsed.entrypoint == [f"glm52-{app.name}"]
    assert parsed.env["HOME"] == "/tmp"
    assert parsed.env["PYTHONDONTWRITEBYTECODE"] == "1"
    assert parsed.env["LOGNAME"], "getpass.getuser() has no other answer for a uid without an entry"


@pytest.mark.parametrize("app", appimages.APPS, ids=lambda app: app.name)
def test_locks_keep_the_two_images_apart(app: appimages.App) -> None:
    pinned = {line.split("==")[0] for line in app.lock.read_text().splitlines() if "==" in line and line[0].isalpha()}
    assert pinned
    assert app.forbidden not in pinned

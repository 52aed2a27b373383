"""The two ways to stop: refused before anything changed, or failed on the way."""


class Refused(Exception):
    """This machine lacks a right or a tool. The message is one sentence with the remedy; nothing was changed."""


class Failed(Exception):
    """A step went wrong. Running the same command again goes on from here."""

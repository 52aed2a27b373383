"""Constant load on an OpenAI endpoint, with marks and assertions over windows of time."""

from e2e.traffic.driver import Traffic
from e2e.traffic.request import Answer, Failure, stream_completion
from e2e.traffic.windows import Window

__all__ = ["Answer", "Failure", "Traffic", "Window", "stream_completion"]

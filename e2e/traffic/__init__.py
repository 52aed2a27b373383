"""Constant load on an OpenAI endpoint, with marks and assertions over windows of time."""

from e2e.traffic.driver import Answer, Traffic, stream_completion

__all__ = ["Answer", "Traffic", "stream_completion"]

"""The GLM-5.2 engine: prefill and decode roles, KV hand-off, OpenAI API and router."""

__version__ = "0.1.0"

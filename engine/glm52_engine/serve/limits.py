"""Names and bounds of the API that the router's document shares with the parser of requests. Imports nothing heavy."""

from __future__ import annotations

from typing import Literal

Endpoint = Literal["chat", "completions"]

MAX_CHOICES = 128
MAX_LISTED_TOKENS = 1024
"""In logit_bias and in stop_token_ids: every step of everybody's batch looks at them."""

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MOST = 2**31 - 1
REPETITION_PENALTY = (0.01, 100.0)
"""Logits are divided by it: what is closer to 0 would make them infinite."""

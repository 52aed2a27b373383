"""Ranks on GPUs: steps as graphs, prompts as chunks, KV mirrored in host memory."""

"""The GPUs of this pod as NVML tells of them: what is there, and when one of them can no longer be trusted."""

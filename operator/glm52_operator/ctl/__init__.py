"""`glm52ctl`, also `kubectl glm52`: what would be applied, what is there, and why it is not ready."""

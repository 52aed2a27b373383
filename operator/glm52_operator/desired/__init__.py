"""Pure builders: a deployment's specification in, child objects as plain dicts out; one module per kind of child."""

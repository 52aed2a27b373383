"""The custom resource: pydantic models and the CRD generated from them."""

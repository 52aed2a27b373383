"""Pure: observed objects in, the status of the deployment out."""

"""KV of prefixes in a Mooncake store: kept in the host memory of all pods of the named roles, found by any of them."""

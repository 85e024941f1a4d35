"""Several replicas as one server."""

"""An engine whose requests run on replicas: routing, connections, messages."""

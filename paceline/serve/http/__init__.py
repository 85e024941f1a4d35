"""HTTP: the app, connections, bodies, middleware, errors, server-sent events."""

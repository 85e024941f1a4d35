"""The trainer: from rows and a head to a candidate, in a process that yields to the server."""

"""The types that travel between rooms: data and small pure methods, no policy."""

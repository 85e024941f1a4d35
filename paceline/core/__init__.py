"""The types that packages exchange: data and small pure methods, no policy."""

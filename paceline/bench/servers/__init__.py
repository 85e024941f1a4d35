"""Requests to servers, measured from the client's side."""

"""Requests to servers, measured from outside."""

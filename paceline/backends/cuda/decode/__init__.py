"""Decoding that stays on the device: draft, verify, advance, without the host."""

"""Executors: how a pass is drafted, run and verified, through the host or on the device."""

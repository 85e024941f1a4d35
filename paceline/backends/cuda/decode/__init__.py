"""The decode loop on the device: draft, verify and advance, without waiting for the host."""

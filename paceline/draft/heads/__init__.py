"""Drafters with a learned head: eagle3, medusa, mtp, dflash and others."""

"""Control: how much each request may draft in a step."""

from paceline.control.controller import Controller, FixedController, Load

__all__ = ["Controller", "FixedController", "Load"]

"""Control: how much each request may draft in a step.

auto.py joins five parts: cost/, acceptance/, planner/, explorer.py and guard.py. See docs/design/control.md.
"""

from paceline.control.controller import Controller, FixedController, Load

__all__ = ["Controller", "FixedController", "Load"]

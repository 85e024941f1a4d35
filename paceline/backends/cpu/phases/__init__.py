"""The phases of a pass, in order: norms, projections, experts, recurrent layers."""

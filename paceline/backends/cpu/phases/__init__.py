"""The phases of a pass besides attention: norms, projections, MLPs, experts, recurrent layers, sampling."""

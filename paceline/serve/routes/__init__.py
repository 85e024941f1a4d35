"""Virtual models: rules, weights, cascades and fallbacks over the models that one server has loaded."""

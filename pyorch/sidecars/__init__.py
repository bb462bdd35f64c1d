"""Files beside a model: buddies, predictors, histories."""

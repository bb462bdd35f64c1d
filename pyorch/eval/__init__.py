"""The cost and the gain of a setting: accuracy on questions, perplexity, and speed."""

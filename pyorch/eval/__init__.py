"""What a setting costs: accuracy on questions, perplexity, and the speed that it buys."""

"""Model families as pure functions over pytrees: configuration, layers, weights and loading."""

"""Deep Gradient Compression of tensors: pure functions."""

"""What a tensor is here: dtypes, reductions, flat views of callers' tensors, registered memory, flat models."""

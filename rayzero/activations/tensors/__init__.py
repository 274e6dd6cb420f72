"""Saved tensors: what autograd keeps in their place, and where their bytes are."""

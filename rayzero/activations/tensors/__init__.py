"""Saved tensors: what autograd keeps in place of each, and where its bytes are."""

"""An optimizer owner's part: gradients come in, are reduced, update the masters, and are published. No transport."""

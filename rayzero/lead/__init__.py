"""The lead: from the inputs of all ranks to one decision a step. Knows no transport."""

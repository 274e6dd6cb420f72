"""What ranks of one host ask the lead in one message: one of them speaks for all."""

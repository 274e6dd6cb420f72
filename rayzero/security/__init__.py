"""Who may talk to whom in a run: certificates, the roles in them, and what each role may call."""

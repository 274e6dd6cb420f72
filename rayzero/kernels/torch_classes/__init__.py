"""Any torch optimizer class: what it needs, what it keeps, several as one."""
